"""Every planning knob, once: a new one is one line here. What it does is in ``search``, whose requests have it by
inheritance; what it excludes is in ``_refuse_conflicts`` of cli/options.py and ``compare`` of search/choose.py.

Four forms are made from these classes, so that none of them can miss a knob or explain it differently:

    PlanOptions --+-- arguments of ``terapipe.plan``; ``compare`` has its ``CompareOptions``, which are fewer  (api.py)
                  +-- options of ``terapipe plan``, ``compare``, ``simulate``   (cli/options.py)
                  +-- keys of ``[plan]`` in run.toml                            (training/config.py)
                  +-- fields of the trainers' ``PipelineConfig``                (trainers/config.py)

The module lies in ``planning``, the lowest room, because the search (``search.Request`` is a ``PlanOptions``) and all
four forms import it, and a room imports only rooms below it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_args, get_origin

from terapipe.planning.device import CUDNN, EFFICIENT, FLASH, FLASH3, FLASH4
from terapipe.planning.limits import LARGEST, check_whole_number
from terapipe.planning.memory import MOST_BYTES, parse_bytes
from terapipe.planning.optimizer_state import OPTIMIZERS
from terapipe.planning.order import ORDERS, order_named
from terapipe.planning.recompute import MODES, Recompute, parse_recompute

MEMORY, FIXED, LIMITS, COSTS = "batch and memory", "layout, order and slices", "limits on slices", "model and costs"


def knob(
    doc: str,
    *,
    default: Any = None,
    unset: str = "any",
    most: int | None = None,
    choices: Callable[[], Iterable[str]] | None = None,
    unit: str = "N",
    group: str = FIXED,
) -> Any:
    """A field of an options class, with all that the forms say about it.

    Args:
        doc: What it does, as every form's help says it. No full stop.
        default: Its value if nobody sets it. None leaves the choice to the planner.
        unset: What None means, in a few words.
        most: The largest whole number allowed. The smallest is 1.
        choices: A function that returns the values to choose from; a function, because orders are registered later.
        unit: What the command line's help writes for the value.
        group: The title under which the command line's help lists it.
    """
    told = {"doc": doc, "unset": unset, "most": most, "choices": choices, "unit": unit, "group": group}
    return field(default=default, metadata=told)


def with_default(name: str, default: Any) -> Any:
    """A knob again, for a form in which it has another default."""
    return field(default=default, metadata=_entry(PlanOptions, name).metadata)


def kind_of(hint: Any) -> type:
    """The type of a knob's values beside None: bool, int, str, or tuple for whole numbers in a row."""
    first = get_args(hint)[0] if type(None) in get_args(hint) else hint
    origin = get_origin(first)
    if origin is None:
        kind: type = first
        return kind
    return tuple if origin is Sequence else str  # what else there is, is a Literal


def explain(entry: Field[Any]) -> str:
    """The text of a knob's help: what it does, and what to choose from."""
    doc, choices = entry.metadata["doc"], entry.metadata["choices"]
    return f"{doc}: {', '.join(choices())}" if choices else str(doc)


def names_of(kind: type) -> tuple[str, ...]:
    """The names of the knobs of an options class."""
    return tuple(entry.name for entry in fields(kind))


def values_of(options: Any, kind: type) -> dict[str, Any]:
    """The values that an object has for the fields of an options class, by name."""
    return {entry.name: getattr(options, entry.name) for entry in fields(kind)}


def _entry(kind: type, name: str) -> Field[Any]:
    return next(entry for entry in fields(kind) if entry.name == name)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Checks every knob by itself when an object is made. What must fit together, subclasses check."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if "unset" in entry.metadata and value is not None:
                object.__setattr__(self, entry.name, _final_value(entry, value))


def _final_value(entry: Field[Any], value: Any) -> Any:
    """The value as the library uses it. Raises ValueError if it cannot be one."""
    kind, name, choices = kind_of(entry.type), entry.name, entry.metadata["choices"]
    if kind is int:
        check_whole_number(name, value, most=entry.metadata["most"])
    elif kind is tuple:
        value = tuple(value)
        for i, number in enumerate(value):
            check_whole_number(f"{name}[{i}]", number)
    elif kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    elif name == "order":
        order_named(value)
    elif name == "recompute":
        return parse_recompute(value, 1, 1)
    elif name == "offload":
        return _parse_offload(value)
    elif choices and value not in choices():
        raise ValueError(f"{name} is one of {', '.join(choices())}, got {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    """What can be fixed for a comparison of all orders."""

    memory: str | int | None = knob(
        "memory budget per device, in bytes or such as 16GiB", unit="BYTES", group=MEMORY,
        unset="what is usable of its memory; on a described cluster less a reserve for context, NCCL and fragmentation",
    )  # fmt: skip
    dp: int | None = knob("number of data parallel replicas", most=2**20)
    pp: int | None = knob("number of pipeline ranks", most=LARGEST["layers"])
    tp: int | None = knob("number of tensor parallel ranks", most=2**16)
    shard: bool | None = knob(
        "shard parameters, gradients and optimizer state over the replicas (FSDP2)",
        unset="if only so a faster plan fits, or it gains half a percent",
    )
    microbatch_size: int | None = knob("sequences per microbatch", most=2**20)
    recompute: Recompute | None = knob(  # noqa: RUF009
        "activations that the backward computes again (activation checkpointing; light: norms and activation "
        "functions, block: all of a layer but its attention, full: the whole stage)",
        choices=lambda: MODES, unit="MODE", unset="what is fastest and fits, also a mixture",
    )  # fmt: skip
    offload: str | float | None = knob(
        "what slices keep for their backwards waits in the host's memory: none, auto (if that is faster than computing "
        "it again), or a share of the slices such as 0.5",
        unit="SHARE",
        group=MEMORY,
        unset="auto where memory and link of the host are known, as of the types of hosts that have a name and in "
        "profiles; else only if nothing fits without",
    )
    offload_kv: bool | None = knob(
        "keys and values of microbatches and stages that wait for their backwards are in the host's memory, too",
        group=MEMORY,
        unset="with offload, if nothing fits without",
    )
    host_memory: str | int | None = knob(
        "memory of the host that offloaded slices of one device may take, in bytes or such as 200GiB",
        unit="BYTES",
        group=MEMORY,
        unset="three quarters of a device's share of it",
    )
    tile: int | None = knob(
        "slice lengths are multiples of this number of tokens", most=LARGEST["max_seq_len"], unit="TOKENS",
        group=LIMITS, unset="128 on A100 and later, else 8",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budget, self.host_budget  # noqa: B018  (raises ValueError if they cannot be read)

    @property
    def budget(self) -> int | None:
        """``memory`` in bytes."""
        return _in_bytes("memory", self.memory)

    @property
    def host_budget(self) -> int | None:
        """``host_memory`` in bytes."""
        return _in_bytes("host_memory", self.host_memory)


def _in_bytes(name: str, value: str | int | None) -> int | None:
    if isinstance(value, str):
        return parse_bytes(value)
    if value is not None:
        check_whole_number(name, value, most=MOST_BYTES)
    return value


def _parse_offload(value: Any) -> str | float:
    """``none``, ``auto``, or a share of the slices; as text from the command line, too."""
    if value in ("none", "auto"):
        return str(value)
    try:
        share = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"offload is none, auto or a share of the slices between 0 and 1, got {value!r}")
    return share or "none"


@dataclass(frozen=True, kw_only=True)
class PlanOptions(CompareOptions):
    """Every planning knob. The planner chooses what is None."""

    order: str | None = knob("order of forwards and backwards", choices=lambda: ORDERS, unit="ORDER")
    num_slices: int | None = knob("cut every sequence into so many equal slices", most=2**16)
    slice_lengths: Sequence[int] | None = knob(
        "cut every sequence into slices of these lengths in tokens, such as 704,688,656", unit="TOKENS,..."
    )
    chunks: int | None = knob("stages per pipeline rank (interleaving)", most=LARGEST["layers"])
    distinct: int | None = knob("use at most so many different slice lengths", most=2**20, group=LIMITS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_slices is not None and self.slice_lengths is not None:
            raise ValueError(
                f"num_slices is a number of equal slices, slice_lengths their lengths; give one, got {self.num_slices} "
                f"and {list(self.slice_lengths)}"
            )

    @property
    def fixed_slices(self) -> bool:
        """Whether the cuts of a sequence are fixed, so that the planner has none to choose."""
        return self.num_slices is not None or self.slice_lengths is not None


@dataclass(frozen=True, kw_only=True)
class CostOptions(Options):
    """How to read the costs. Not in run.toml and ``PipelineConfig``, whose costs are always measured on the spot."""

    devices: int | None = knob(
        "number of ranks to plan for, if a profile was measured on another number", most=2**20, group=COSTS,
        unset="dp x pp x tp, or as many as were measured",
    )  # fmt: skip
    layers_only: bool = knob(
        "ignore embedding, head and loss, as the TeraPipe paper does (with a described cluster)",
        default=False, group=COSTS,
    )  # fmt: skip
    attention: str | None = knob(
        "attention kernel of a described cluster, where not the usual one is used", group=COSTS, unit="KERNEL",
        unset="what the runtime would choose there", choices=lambda: (FLASH, FLASH3, FLASH4, CUDNN, EFFICIENT),
    )  # fmt: skip
    autocast: bool = knob(
        "weights are float32, products are autocast to half precision, as bf16=True of Hugging Face trainers has it "
        "(with a described cluster; a profile knows it)",
        default=False, group=COSTS,
    )  # fmt: skip
    optimizer: str | None = knob(
        "whose state every parameter has: on the device, or with adamw-offload in the host's memory",
        choices=lambda: OPTIMIZERS, group=COSTS, unit="NAME",
        unset="adamw, with a float32 copy of parameters in half precision as `terapipe train` has it",
    )  # fmt: skip
