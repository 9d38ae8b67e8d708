"""A Profile: measurements of a model on a machine, as plain data that can be saved as JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

from terapipe import files
from terapipe.planning.hardware import CPU_ATTENTION, EFFICIENT, FLASH
from terapipe.planning.limits import LARGEST
from terapipe.planning.presets import GPTConfig

FORMAT = 2
READ = (1, 2)  # format 1 has no host times
MOST_RANKS = 2**20
# Bytes per element, and bytes of optimizer state per parameter: AdamW's two moments, and with half precision also the
# float32 copy that `terapipe train` keeps.
ELEMENT = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
STATE = {"float16": 12, "bfloat16": 12, "float32": 8, "float64": 16}
KINDS = ("forward", "backward", "weights", "block", "embedding", "embedding_backward", "head")


def typical(seconds: Sequence[float]) -> float:
    """The mean of the faster half of the measurements.

    Other programs on the machine only ever add time, so the slower half says more about them. A mean rather than a
    minimum, because a step is a sum over many slices.
    """
    ordered = sorted(seconds)
    return fmean(ordered[: (len(ordered) + 1) // 2])


class Sample(NamedTuple):
    """Repeated measurements of one slice on the measured stage, or of the ends of the model.

    ``forward``, ``backward``, ``weights`` (gradients of weights, the part of a backward that can be deferred) and
    ``block`` (what block recomputation adds to a backward) cover all layers of the stage. ``head`` is final
    norm, head and loss, forward plus backward. Seconds are those of the device.
    """

    kind: str
    size: int
    length: int
    context: int
    seconds: tuple[float, ...]
    held_out: bool = False  # not used to fit, only to test the fit
    host: tuple[float, ...] = ()  # seconds in which the host issued it; none where the host computes


class Transfer(NamedTuple):
    """Repeated measurements of a message from one rank to the next, in one direction."""

    nbytes: int
    seconds: tuple[float, ...]
    between_hosts: bool = False  # otherwise within one host
    host: tuple[float, ...] = ()  # seconds in which the host posted one end of it


@dataclass(frozen=True)
class Profile:
    """What ``terapipe.profile`` measured: of a model, on some ranks. ``save`` and ``load`` keep it as a JSON file."""

    config: GPTConfig
    layers: int  # layers of the measured stage
    seq_len: int  # longest measured sequence
    ranks: int  # ranks that measured at the same time
    samples: tuple[Sample, ...]
    transfers: tuple[Transfer, ...]
    optimizer: tuple[float, ...]  # repeated measurements of an optimizer step: seconds per parameter
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    hosts: tuple[str, ...] = ()  # host name of each rank; empty: all on one host

    def __post_init__(self) -> None:
        if not self.hosts:
            object.__setattr__(self, "hosts", ("",) * self.ranks)
        if len(self.hosts) != self.ranks:
            raise ValueError(
                f"a profile names the host of every rank, got {len(self.hosts)} hosts and {self.ranks} ranks; "
                "measure again with terapipe.profile"
            )
        for dtype in (self.dtype, self.autocast or self.dtype):
            if dtype not in ELEMENT:
                raise ValueError(f"a profile is of one of {', '.join(ELEMENT)}, got {dtype!r}")

    @property
    def dtype(self) -> str:
        """The dtype of parameters, activations and gradients, hence also of messages and gradient all-reduces."""
        return str(self.machine.get("dtype", "float32"))

    @property
    def element(self) -> int:
        """Bytes per element of ``dtype``."""
        return ELEMENT[self.dtype]

    @property
    def autocast(self) -> str | None:
        """The dtype that products were autocast to, if they were."""
        return self.machine.get("autocast")

    @property
    def on_gpu(self) -> bool:
        return bool(self.machine.get("device", "cpu") != "cpu")

    @property
    def attention(self) -> str:
        """The attention kernel. Older profiles do not name it: the one that such a device has as a rule."""
        half = ELEMENT[self.autocast or self.dtype] == 2
        usual = (FLASH if half else EFFICIENT) if self.on_gpu else CPU_ATTENTION
        return str(self.machine.get("attention", usual))

    @cached_property
    def ranks_per_host(self) -> int:
        """Ranks on the host that has most of them."""
        return max(Counter(self.hosts).values())

    def save(self, path: str | Path) -> None:
        files.write(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        text = files.read(Path(path))
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_json(self) -> str:
        samples = [sample._asdict() for sample in self.samples]
        transfers = [transfer._asdict() for transfer in self.transfers]
        shape = {"layers": self.layers, "seq_len": self.seq_len, "ranks": self.ranks, "hosts": list(self.hosts)}
        measured = {**shape, "optimizer": list(self.optimizer)}
        about = {"model": asdict(self.config), "machine": dict(self.machine), "versions": dict(self.versions)}
        return json.dumps({"format": FORMAT, **about, **measured, "transfers": transfers, "samples": samples}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"a profile must be whole JSON, this one is damaged or cut off: {error}; measure again with "
                "terapipe.profile"
            ) from None
        if not isinstance(data, dict) or data.get("format") not in READ:
            got = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(
                f"this version reads profiles of formats {' and '.join(map(str, READ))}, got {got!r}; measure again "
                "with terapipe.profile"
            )
        try:
            if not isinstance(data["machine"], dict) or not isinstance(data["versions"], dict):
                raise TypeError("machine or versions")
            samples = tuple(_sample(row) for row in data["samples"])
            transfers = tuple(_transfer(row) for row in data["transfers"])
            return cls(
                config=GPTConfig(**data["model"]),
                layers=_count(data["layers"], "layers", LARGEST["layers"]),
                seq_len=_count(data["seq_len"], "seq_len", LARGEST["max_seq_len"]),
                ranks=_count(data["ranks"], "ranks", MOST_RANKS),
                samples=samples,
                transfers=transfers,
                optimizer=_seconds(data["optimizer"]),
                machine=data["machine"],
                versions=data["versions"],
                hosts=tuple(map(str, data.get("hosts", ()))),
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"this profile lacks or misnames {error}; measure again with terapipe.profile") from None

    def check_model(self, config: GPTConfig) -> None:
        """Raises ValueError if the profile is of another model. ``max_seq_len`` may differ: it costs no time."""
        own, other = asdict(self.config), asdict(config)
        differ = [f"{k} {own[k]} and {other[k]}" for k in own if k != "max_seq_len" and own[k] != other[k]]
        if differ:
            raise ValueError(
                f"the profile is of another model: {', '.join(differ)} (profile and model); "
                "profile this model, or leave the model out"
            )


def _count(value: Any, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} of a profile must be a whole number between 1 and {most}, got {value!r}")
    return value


def _sample(row: Mapping[str, Any]) -> Sample:
    if row["kind"] not in KINDS:
        raise ValueError(f"a sample's kind is one of {', '.join(KINDS)}, got {row['kind']!r}")
    numbers = int(row["size"]), int(row["length"]), int(row["context"])
    return Sample(row["kind"], *numbers, _seconds(row["seconds"]), bool(row["held_out"]), _host(row))


def _transfer(row: Mapping[str, Any]) -> Transfer:
    return Transfer(int(row["nbytes"]), _seconds(row["seconds"]), bool(row.get("between_hosts", False)), _host(row))


def _host(row: Mapping[str, Any]) -> tuple[float, ...]:
    return _seconds(row["host"]) if row.get("host") else ()


def _seconds(values: Any) -> tuple[float, ...]:
    seconds = tuple(float(v) for v in values)
    if not seconds or not all(0 <= v < float("inf") for v in seconds):
        raise ValueError(f"measured seconds must be finite and at least 0, at least one of them, got {list(seconds)}")
    return seconds
