"""A Profile: measurements of a model on a machine, saved as JSON, and the costs of slices that are fitted to them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

import numpy as np

from terapipe import files
from terapipe.planning.cost import Array, HostTime, LinkBehavior, Numbers, StageSpec
from terapipe.planning.device import CPU_ATTENTION, EFFICIENT, FLASH
from terapipe.planning.layout import Layout
from terapipe.planning.limits import LARGEST
from terapipe.planning.memory import ShapeMemory, parameters
from terapipe.planning.presets import GPTConfig
from terapipe.planning.recompute import Recompute

FORMAT = 2
READ = (1, 2)  # format 1 has no host times
MOST_RANKS = 2**20
# Bytes per element, and bytes of optimizer state per parameter: AdamW's two moments, and with half precision also the
# float32 copy that `terapipe train` keeps.
ELEMENT = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
STATE: dict[str, float] = {"float16": 12, "bfloat16": 12, "float32": 8, "float64": 16}
KINDS = ("forward", "backward", "weights", "light", "block", "embedding", "embedding_backward", "head")


def typical(seconds: Sequence[float]) -> float:
    """The mean of the faster half of the measurements.

    Other programs on the machine only ever add time, so the slower half says more about them. A mean rather than a
    minimum, because a step is a sum over many slices.

    Args:
        seconds: Repeated measurements of the same work, at least one.
    """
    ordered = sorted(seconds)
    return fmean(ordered[: (len(ordered) + 1) // 2])


class Sample(NamedTuple):
    """Repeated measurements of one slice on the measured stage, or of the ends of the model.

    ``forward``, ``backward``, ``weights`` (gradients of weights, the part of a backward that can be deferred),
    ``light`` and ``block`` (what these recomputations add to a backward) cover all layers of the stage. ``head`` is
    final norm, head and loss, forward plus backward. Seconds are those of the device.
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
        """Whether a GPU was measured, rather than a CPU."""
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
        """Writes the profile as a JSON file.

        Args:
            path: The file.
        """
        files.write(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a profile that ``save`` wrote. A ValueError says what is wrong with the file.

        Args:
            path: The file.
        """
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


@dataclass(frozen=True)
class Fit:
    """Seconds of one kind of work on the measured stage:

        seconds = base(size, length) + a * (context > 0) + b * size * context + c * size * length * context

    ``base`` interpolates the measurements without context, linearly in length and then in size. The coefficients
    ``a, b, c >= 0`` (``context``) stand for the overhead of a second attention block, for reading its keys and values,
    and for its scores. They are fitted to what measurements with context take longer than ``base``.
    ``tables`` maps each measured size to its lengths and seconds without context.
    """

    tables: dict[int, tuple[Array, Array]]
    context: Array

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Fit":
        """Fits the formula to samples of one kind.

        Args:
            samples: Measurements with and without context, at some sizes and lengths.
        """
        tables = {}
        for n in sorted({s.size for s in samples}):
            rows = sorted((s.length, typical(s.seconds)) for s in samples if s.size == n and not s.context)
            tables[n] = (np.array([r[0] for r in rows], float), np.array([r[1] for r in rows], float))
        base = cls(tables, np.zeros(3))
        with_context = [s for s in samples if s.context]
        if not with_context:
            return base
        size, length, context = np.array([(s.size, s.length, s.context) for s in with_context], float).T
        seconds = np.array([typical(s.seconds) for s in with_context])
        added = seconds - base(size, length, context)
        return cls(tables, nonnegative_fit(_features(size, length, context), added, seconds))

    def __call__(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        sizes, lengths, contexts = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (size, length, context)))
        added: Array = np.asarray(_features(sizes, lengths, contexts) @ self.context, dtype=np.float64)
        return np.maximum(self._base(sizes, lengths), 0.0) + added

    def _base(self, size: Array, length: Array) -> Array:
        measured = list(self.tables)
        rows = np.stack([_interpolate(length, *self.tables[n]) for n in measured])  # by measured size
        if len(measured) == 1:
            return np.asarray(rows[0] * size / measured[0], dtype=np.float64)
        # Between the two neighboring sizes; beyond the largest and smallest, extrapolate from the last two.
        at = np.clip(np.searchsorted(measured, size, side="right") - 1, 0, len(measured) - 2)
        low, high = np.take(measured, at), np.take(measured, at + 1)
        below, above = (np.take_along_axis(rows, (at + i)[None], 0)[0] for i in (0, 1))
        return np.asarray(below + (above - below) * (size - low) / (high - low), dtype=np.float64)


def _features(size: Array, length: Array, context: Array) -> Array:
    """The factors of a, b and c in the formula of `Fit`."""
    return np.stack([1.0 * (context > 0), size * context, size * length * context], axis=-1)


def nonnegative_fit(features: Array, target: Array, scale: Array) -> Array:
    """Nonnegative least squares of the errors relative to ``scale``.

    Tries ordinary least squares on every subset of the features and keeps the best solution without a negative
    coefficient. There are three features, so seven subsets: no solver is needed.

    Args:
        features: A row for each measurement, a column for each coefficient.
        target: What the coefficients times the features should give.
        scale: What each error is divided by: a millisecond matters more in a short measurement.
    """
    best, least = np.zeros(features.shape[1]), float(np.sum((target / scale) ** 2))
    rows = features / scale[:, None]
    for count in range(1, features.shape[1] + 1):
        for subset in map(list, combinations(range(features.shape[1]), count)):
            coefficients = np.linalg.lstsq(rows[:, subset], target / scale, rcond=None)[0]
            error = float(np.sum((rows[:, subset] @ coefficients - target / scale) ** 2))
            if (coefficients >= 0).all() and error < least:
                best, least = np.zeros(features.shape[1]), error
                best[subset] = coefficients
    return best


def _interpolate(x: Array, xs: Array, ys: Array) -> Array:
    """Piecewise linear through the points; beyond the ends, the outermost segment is extended."""
    if len(xs) == 1:
        return np.asarray(ys[0] * x / xs[0], dtype=np.float64)
    at = np.clip(np.searchsorted(xs, x) - 1, 0, len(xs) - 2)
    slope = (ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at])
    return np.asarray(ys[at] + slope * (x - xs[at]), dtype=np.float64)


def _issue_time(points: Sequence[tuple[float, ...]]) -> float:
    """Seconds of the host, which are the same for slices of all lengths: the mean of the faster half of the points.
    Behind a device that lags, the host waits until there is room in its queue, so long slices show the device's time.
    0 without measurements."""
    seconds = [typical(point) for point in points if point]
    return typical(seconds) if seconds else 0.0


@dataclass(frozen=True)
class MeasuredLink:
    """Measured messages between two ranks: their bytes, in ascending order, and seconds."""

    nbytes: Array
    seconds: Array
    between_hosts: bool

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> "MeasuredLink":
        """Interpolates between measured messages.

        Args:
            transfers: Measurements of messages of several sizes.
        """
        rows = sorted((t.nbytes, typical(t.seconds)) for t in transfers)
        nbytes, seconds = (np.array(column, float) for column in zip(*rows, strict=True))
        return cls(nbytes, seconds, any(t.between_hosts for t in transfers))

    @cached_property
    def latency(self) -> float:
        """The time of an empty message, by extrapolation."""
        return float(np.clip(_interpolate(np.zeros(()), self.nbytes, self.seconds), 0.0, self.seconds.min()))

    def __call__(self, nbytes: Numbers) -> Array:
        return np.maximum(_interpolate(np.asarray(nbytes, np.float64), self.nbytes, self.seconds), self.latency)


NO_LINK = MeasuredLink(np.ones(1), np.zeros(1), False)  # for profiles without transfers: they cost nothing


@dataclass(frozen=True)
class FittedCost:
    """Seconds of slices, interpolated from a profile.

    Ranks, numbered tp innermost, then pp, then dp, fill the hosts in order, as many on each as in the profile. A
    computation takes what it took on the device, or as long as the host took to issue it, if that is longer.

    Args:
        profile: The measurements.
        recompute: What backwards compute again.
        layout: Replicas, pipeline ranks and tensor parallel ranks. It says which ranks share a host.
        fused: Whether gradients of weights can be deferred.
        hosted: Whether a computation takes as long as its host does, if that is longer.
    """

    profile: Profile
    recompute: Recompute = "none"
    layout: Layout = field(default_factory=Layout)
    fused: bool = True  # whether gradients of weights can be deferred
    hosted: bool = True  # whether a computation takes as long as its host does, if that is longer

    def __post_init__(self) -> None:
        for kind in ("forward", "backward"):
            if not any(s.kind == kind and not s.context and not s.held_out for s in self.profile.samples):
                raise ValueError(
                    f"the profile has no {kind} without context to start from; measure again with terapipe.profile"
                )

    @cached_property
    def _fits(self) -> dict[str, Fit]:
        samples = [s for s in self.profile.samples if not s.held_out]
        kinds = {s.kind for s in samples}
        return {kind: Fit.of([s for s in samples if s.kind == kind]) for kind in kinds}

    def with_recompute(self, mode: Recompute) -> "FittedCost":
        """The same costs, with backwards that compute activations again."""
        return self._copy_with(recompute=mode)

    def by_side(self) -> tuple["FittedCost", HostTime]:
        """Device and host apart: a device that never waits for its host, and what the host takes."""
        return self._copy_with(hosted=False), self._host if self.hosted else HostTime()

    def _copy_with(self, **fields: Any) -> "FittedCost":
        """A copy, with the fits of the same profile."""
        changed = replace(self, **fields)
        changed.__dict__["_fits"] = self._fits
        return changed

    @cached_property
    def _host(self) -> HostTime:
        kinds = {kind: _issue_time([s.host for s in self.profile.samples if s.kind == kind]) for kind in KINDS}
        per_layer = {kind: seconds / self.profile.layers for kind, seconds in kinds.items()}
        again = {"none": 0.0, "full": per_layer["forward"]}.get(self.recompute, per_layer[self._measured])
        return HostTime(
            per_layer["forward"],
            per_layer["backward"] + again,
            per_layer["weights"] * self.fused,
            embedding=kinds["embedding"],
            embedding_backward=kinds["embedding_backward"],
            head=kinds["head"],
            message=_issue_time([t.host for t in self.profile.transfers]),
        )

    def _seconds(self, kind: str, size: Numbers, length: Numbers, context: Numbers = 0.0) -> Array:
        """Seconds of one kind of work, 0 if the profile has no samples of it."""
        fit = self._fits.get(kind)
        return fit(size, length, context) if fit else np.zeros(np.broadcast(size, length, context).shape)

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Seconds of a forward. Measured layers stand for all layers, so their time is scaled by the number."""
        seconds = self._seconds("forward", size, length, context) * (stage.layers / self.profile.layers)
        if stage.first:
            seconds = seconds + self._seconds("embedding", size, length)
        if stage.last:
            seconds = seconds + self._seconds("head", size, length)
        return np.maximum(seconds, self._host.of_forward(stage)) if self.hosted else seconds

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        """Seconds of a backward, and of what it computes again."""
        seconds = self._seconds("backward", size, length, context) + self._recompute_time(size, length, context)
        seconds = seconds * (stage.layers / self.profile.layers)
        if stage.first:
            seconds = seconds + self._seconds("embedding_backward", size, length)
        return np.maximum(seconds, self._host.of_backward(stage)) if self.hosted else seconds

    def _recompute_time(self, size: Numbers, length: Numbers, context: Numbers) -> Array | float:
        if self.recompute == "full":
            return self._seconds("forward", size, length, context)
        return 0.0 if self.recompute == "none" else self._seconds(self._measured, size, length)

    @property
    def _measured(self) -> str:
        """The kind of samples that tells what recomputation of layers takes. Older profiles do not have all: light
        recomputation takes no longer than that of blocks, and that about as long as a forward without context."""
        kinds = ("light", "block") if self.recompute == "light" else ("block",)
        return next((kind for kind in kinds if kind in self._fits), "forward")

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        seconds = self._seconds("weights", size, length) * (stage.layers / self.profile.layers * self.fused)
        return np.maximum(seconds, self._host.of_weights(stage)) if self.hosted else seconds

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        nbytes = np.multiply(size, length) * float(self.profile.config.hidden * self.profile.element)
        return self._link(source * self.layout.tp, target * self.layout.tp)(nbytes)

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        """On a CPU, the thread that sends competes with the one that computes. Within a host a message is nothing but
        copying, so it does not overlap. A message to another host mostly waits for the network, so it does."""
        link = self._link(source * self.layout.tp, target * self.layout.tp)
        return LinkBehavior(link.between_hosts or self.profile.machine.get("device") != "cpu", link.latency)

    def copy(self, stage: StageSpec, size: Numbers, length: Numbers, seq_len: int) -> tuple[Array, Array]:
        """Seconds in which what a slice keeps, and keys and values, go to the host's memory, or come back."""
        profile = self.profile
        bandwidth = float(profile.machine.get("copies", 0.0))
        if not bandwidth:
            raise ValueError(
                "the profile does not say how fast copies to the host are, which an offloaded plan needs; measure "
                "again with terapipe.profile"
            )
        element, autocast = ELEMENT[profile.autocast or profile.dtype], profile.autocast is not None
        memory = ShapeMemory(profile.config, element, recompute=self.recompute, autocast=autocast)
        return memory.offloaded(stage, size, length) / bandwidth, memory.kv_cache(stage, size, seq_len) / bandwidth

    @property
    def copies_block(self) -> bool:
        """A CPU copies by itself."""
        return not self.profile.on_gpu

    def per_step(self, stages: Sequence[StageSpec]) -> float:
        """Optimizer, gradient all-reduce over replicas, and the exchange of a tied weight's gradient."""
        config, count = self.profile.config, parameters(self.profile.config, stages)
        seconds = count * typical(self.profile.optimizer) + self._all_reduce_gradients(count)
        if config.tied and any(stage.first for stage in stages) != any(stage.last for stage in stages):
            ends = self._link(0, (self.layout.pp - 1) * self.layout.tp)
            seconds += float(ends(float(self.profile.element) * config.vocab * config.hidden))
        return seconds

    # Links

    @cached_property
    def _links(self) -> tuple[MeasuredLink, MeasuredLink]:
        """The links within a host and between hosts. If only one was measured, it stands for both."""
        transfers = self.profile.transfers
        if not transfers:
            return NO_LINK, NO_LINK
        within, between = ([t for t in transfers if t.between_hosts == apart] for apart in (False, True))
        return MeasuredLink.of(within or between), MeasuredLink.of(between or within)

    def _link(self, a: int, b: int) -> MeasuredLink:
        per_host = self.profile.ranks_per_host
        return self._links[a // per_host != b // per_host]

    def _all_reduce_gradients(self, count: int) -> float:
        """The ring all-reduce over replicas, in float32 or wider. The ranks of a host share one link to others."""
        dp, replica = self.layout.dp, self.layout.pp * self.layout.tp
        if dp == 1:
            return 0.0
        sent = 2 * (dp - 1) / dp * max(self.profile.element, 4) * count
        per_host = self.profile.ranks_per_host
        if self.layout.devices <= per_host:
            return float(self._link(0, 0)(sent))
        return float(self._link(0, per_host)(sent * min(replica, per_host)))

    def errors(self) -> list[float]:
        """Relative errors on the held-out samples."""
        return [
            float(self._seconds(s.kind, s.size, s.length, s.context)) / typical(s.seconds) - 1
            for s in self.profile.samples
            if s.held_out
        ]
