r"""What must be equal on all ranks of a pipeline.

It is compared when the pipeline is made: a model with other heads on one rank would otherwise train, and one of another
dtype or width end in a crash of the transfers.

Ranks exchange one number for each set of traits. Only where these differ, they exchange the traits themselves, and all
ranks raise the same words: who differs, and in what::

    rank 0    crc of traits  7f31   \                                           config.num_heads (8 instead of 16)
    rank 1    crc of traits  7f31    > gathered; 19a2 is another: gather all --> named on all four ranks
    rank 2    crc of traits  19a2   /
    rank 3    crc of traits  7f31  /
"""

import enum
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from terapipe.modeling.stage import PipelineModel, Stage
from terapipe.runtime.checkpoint.frozen import local_sums
from terapipe.runtime.comm.mesh import ALL, DP
from terapipe.runtime.comm.transport import Transport, checksum

SHOWN, WIDTH = 3, 200  # differences that a message names, and characters of each
DEPTH = 6  # of nested configurations


class Traits(NamedTuple):
    """What a rank says about its model, its plan and its options.

    Args:
        values: by name, in words: what is compared is what the message shows.
        place: only ranks of the same place are compared, such as replicas of the same stage.
        is_partial: whether a rank may not know all of them. Those that only some know are not compared then.
    """

    values: dict[str, str]
    place: int = 0
    is_partial: bool = False


def refuse_differences(transport: Transport, *mine: Traits) -> None:
    """Raises ValueError on all ranks if one differs. All ranks call it together.

    Args:
        transport: of the pipeline.
        *mine: this rank's, as many as on the other ranks and in the same order. Each is compared with its like.
    """
    numbers = [n for traits in mine for n in (traits.place, checksum(json.dumps(traits.values, sort_keys=True)))]
    rows = transport.gather_numbers(numbers, ALL)
    for i, traits in enumerate(mine):
        # More pairs than places: some place has two checksums.
        seen = {*zip(rows[:, 2 * i].tolist(), rows[:, 2 * i + 1].tolist(), strict=True)}
        if len(seen) > len({place for place, _ in seen}):
            _refuse_difference(transport, transport.gather(traits, ALL))


def _refuse_difference(transport: Transport, everyone: list[Traits]) -> None:
    """Names the first rank that is unlike most of its place. It may raise nothing: partial traits have other checksums
    where one rank knows more than another, without any difference."""
    for place in sorted({traits.place for traits in everyone}):
        ranks = [rank for rank, traits in enumerate(everyone) if traits.place == place]
        usual = _most_common(ranks, everyone)
        for rank in ranks:
            if differences := _differences(everyone[usual], everyone[rank]):
                more = f", and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
                other = "; if this may differ, give the model a method traits()" if "config." in differences[0] else ""
                if differences[0].startswith("values of "):
                    other = "; draw weights from the same seed (torch.manual_seed) or load the same file on all ranks"
                raise ValueError(
                    f"all ranks must have the same model, plan and options, {transport.ranks.name(rank)} differs from "
                    f"{transport.ranks.name(usual)} in {', '.join(differences[:SHOWN])}{more}{other}"
                )


def _most_common(ranks: list[int], everyone: list[Traits]) -> int:
    """The first of those ranks that most others are like: the odd one out is to be named."""
    return max(ranks, key=lambda rank: (sum(everyone[rank] == everyone[other] for other in ranks), -rank))


def _differences(usual: Traits, other: Traits) -> list[str]:
    """Returns each difference in words, cut to a readable width: a configuration may be pages long."""
    names = [*usual.values, *(name for name in other.values if name not in usual.values)]
    if usual.is_partial:
        names = [name for name in names if name in usual.values and name in other.values]
    pairs = ((name, usual.values.get(name, "nothing"), other.values.get(name, "nothing")) for name in names)
    return [f"{name} ({there[:WIDTH]} instead of {here[:WIDTH]})" for name, here, there in pairs if here != there]


# What is compared


def model_traits(model: PipelineModel) -> dict[str, str]:
    """Describes the whole model, as far as it tells: see ``PipelineModel.traits``.

    Args:
        model: the same on all ranks, which is what is to be compared.
    """
    about: dict[str, Any] = {"model class": type(model).__qualname__, "layers": model.num_layers, "tied": model.tied}
    return flatten(about | dict(model.traits()))


def stage_traits(model: PipelineModel, stages: Mapping[int, Stage], tile: int) -> dict[str, str]:
    """What is equal wherever it is known: stages hold different layers, a rank may have more of the model than its
    own.

    Args:
        model: asked for the whole module, if this rank has it.
        stages: those of this rank.
        tile: lengths must be multiples of it, also that of the example which gives the shape of hidden states.
    """
    about: dict[str, Any] = {}
    for stage in stages.values():
        about["shape of hidden states"] = tuple(stage.hidden_shape(1, 8 * tile))
        names = ("vocabulary of inputs", "vocabulary of labels")
        about |= {name: size for name, size in zip(names, stage.vocabulary, strict=True) if size is not None}
    dtypes = {p.dtype for stage in stages.values() for p in stage.parameters() if p.is_floating_point()}
    if len(dtypes) == 1:  # of a model with several, stages may have different ones
        about["dtype"] = dtypes.pop()
    if (whole := model.whole_module()) is not None:
        about |= parameter_traits(whole.named_parameters())
        about |= {name: f"{m._get_name()}({m.extra_repr()})" for name, m in whole.named_modules() if _is_layer(m)}
    return flatten(about)


def part_traits(
    model: PipelineModel, stages: Mapping[int, Stage], tile: int, transport: Transport
) -> tuple[Traits, ...]:
    """What all ranks must agree on once their stages are made, what those that hold the same stages must, and what
    those that hold the same parts of them.

    Args:
        model: the whole model.
        stages: those of this rank.
        tile: lengths must be multiples of it.
        transport: tells which part of its stages this rank holds.
    """
    parameters = [named for stage in stages.values() for named in stage.named_parameters()]
    place = transport.rank * transport.tp_size + transport.tp_rank
    return (
        Traits(stage_traits(model, stages, tile), is_partial=True),
        Traits(parameter_traits(parameters, trained=True), transport.rank),
        Traits(weight_traits(parameters) if transport.ranks[DP].has_peers else {}, place),
    )


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is one of torch's own layers, which describe themselves: the probability of a dropout, the
    epsilon of a norm. Other modules may have anything in their description, also what differs between ranks."""
    return type(module).__module__.startswith("torch.nn.modules.") and not any(module.children())


def parameter_traits(named: Iterable[tuple[str, nn.Parameter]], *, trained: bool = False) -> dict[str, str]:
    """Shapes and dtypes, without those of which the memory was given back.

    Args:
        named: parameters by name.
        trained: whether to say which are frozen. It must be equal for replicas of a stage; the whole model on a rank
            may have been frozen before or after its stages were made.
    """
    return {
        name: f"{tuple(p.shape)} of {p.dtype}{', frozen' if trained and not p.requires_grad else ''}"
        for name, p in named
        if p.numel()
    }


def weight_traits(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Sums of the bits of the weights that a rank holds: replicas must begin with the same ones. Their gradients are
    averaged and their weights never are, so replicas that begin apart stay apart.

    Args:
        named: parameters of this rank's stages by name.
    """
    return {f"values of {name}": f"checksum {total:x}" for name, total in local_sums(dict(named)).items()}


def flatten(value: Any, name: str = "") -> dict[str, str]:
    """Nested dictionaries and dataclasses as one, by names with dots, so that a difference is named exactly:
    ``config.rope.theta`` instead of two whole configurations.

    Args:
        value: anything; what ``plain`` makes of it is taken.
        name: of the value, before the names inside it.
    """
    value = plain(value)
    if not isinstance(value, dict):
        return {name: str(value)}
    flat: dict[str, str] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{name}.{key}" if name else str(key))
    return flat


def plain(value: Any, depth: int = DEPTH) -> Any:
    """What two processes can compare: numbers, words and collections of them; of other objects the class, of functions
    the name. What a function remembers counts only of those that this package made: others' may be about their rank.

    Args:
        value: of an option or a configuration.
        depth: how far to look into what is nested; an object may contain itself.
    """
    inner: Callable[[Any], Any] = functools.partial(plain, depth=depth - 1)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | enum.Enum):
        return str(value) if isinstance(value, enum.Enum) else value
    if depth and hasattr(value, "to_dict") and not isinstance(value, type):
        return {"class": type(value).__qualname__, **inner(value.to_dict())}
    if depth and is_dataclass(value) and not isinstance(value, type):
        return {"class": type(value).__qualname__, **{f.name: inner(getattr(value, f.name)) for f in fields(value)}}
    if depth and isinstance(value, Mapping):
        return {str(key): inner(value[key]) for key in value}
    if depth and isinstance(value, Set):
        return sorted(map(str, value))
    if depth and isinstance(value, list | tuple):
        return [inner(each) for each in value]
    if depth and isinstance(value, functools.partial):
        return {"function": inner(value.func), "arguments": inner(value.args), **inner(value.keywords)}
    if isinstance(value, FunctionType):
        is_ours = value.__module__.partition(".")[0] == __name__.partition(".")[0]
        if not depth or not is_ours or not value.__closure__:
            return value.__qualname__
        cells = zip(value.__code__.co_freevars, (cell.cell_contents for cell in value.__closure__), strict=True)
        return {"function": value.__qualname__, **{cell: inner(content) for cell, content in cells}}
    return type(value).__qualname__
