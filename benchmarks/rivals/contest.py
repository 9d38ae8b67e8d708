"""One case: the batch, what takes part, the check of its gradients, and the race."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from benchmarks.harness import Contender, best, race
from benchmarks.step.measure import cross_entropy
from benchmarks.step.models import GPT_CONFIG, GPT_FAMILY, VOCAB, GPTPart
from terapipe import GPT
from terapipe.runtime import MemoryCounter

# As in benchmarks.step, but for the head: its own weight, not the embedding's. Two stages that share a weight add its
# gradients up, which ours and DeepSpeed's do and torch's leave to the user.
CONFIG = replace(GPT_CONFIG, tied=False)
FAMILY = replace(GPT_FAMILY, whole=lambda: GPT(CONFIG), part=partial(GPTPart, config=CONFIG))
TOLERANCE = 1e-4  # of a parameter's largest gradient; float32 in another order of sums is about 1e-6 off


@dataclass
class Case:
    """A batch. Every rank has all of it, as launchers of all contenders may give it to them."""

    sequences: int
    tokens: int
    ids: Tensor = field(init=False)
    labels: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (self.sequences, self.tokens)
        self.ids, self.labels = (torch.randint(VOCAB, shape, generator=generator) for _ in range(2))


class Contestant:
    """A whole training step: forward, backward, SGD, gradients dropped.

    The learning rate is 0, so that all steps of a race compute the same.

    Args:
        module: This rank's weights, with names that end as the plain model's.
        names: The plain model's names of the parameters of ``module``, in its order; by default its own, without
            what wrappers put before them.
    """

    def __init__(self, module: nn.Module, names: Iterable[str] | None = None) -> None:
        self.module = module
        own = (plain_name(name) for name, _ in module.named_parameters())
        self.parameters = dict(zip(own if names is None else names, module.parameters(), strict=True))
        self.optimizer = SGD(self.parameters.values(), lr=0.0)
        self.backward: Contender = lambda: None

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain_name(name: str) -> str:
    """Without the names of wrappers, before, and of checkpointing, between."""
    parts = [part for part in name.split(".") if part != "_checkpoint_wrapped_module"]
    starts = ("embedding", "positions", "layers", "norm", "head")
    return ".".join(parts[next(i for i, part in enumerate(parts) if part in starts) :])


Entrant = Callable[[Case], Contestant]


@dataclass(frozen=True)
class Result:
    """Of one contender: why it was not timed, or figures.

    Attributes:
        seconds: The fastest step.
        peak: Most bytes of tensors on one rank, weights and gradients among them.
        error: The largest difference of a gradient, relative to the largest one of its parameter.
        reason: Why it is no comparison; empty if it is one.
    """

    seconds: float = 0.0
    peak: int = 0
    error: float = 0.0
    reason: str = ""


def contest(entrants: Mapping[str, Entrant], sequences: int, tokens: int, rounds: int) -> dict[str, Result]:
    """Times those whose gradients are the plain model's, taking turns. All ranks call it, with the same arguments."""
    case = Case(sequences, tokens)
    expected = plain_gradients(case)
    results: dict[str, Result] = {}
    admitted: dict[str, Contender] = {}
    for name, entrant in entrants.items():
        contestant, results[name] = admission(entrant, case, expected)
        if contestant is not None:
            admitted[name] = contestant.step
    del expected
    seconds = best(race(admitted, rounds, warmup=0))  # the check was the warm-up
    return {
        name: Result(seconds[name], result.peak, result.error) if name in seconds else result
        for name, result in results.items()
    }


def plain_gradients(case: Case) -> dict[str, Tensor]:
    """Of the plain model on one device, sequence by sequence."""
    model = GPT(CONFIG)
    for ids, labels in zip(case.ids.split(1), case.labels.split(1), strict=True):
        (cross_entropy(model.logits(model(ids)), labels) / case.sequences).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def admission(entrant: Entrant, case: Case, expected: Mapping[str, Tensor]) -> tuple[Contestant | None, Result]:
    """One step, whose gradients and memory are looked at; without the contestant where it cannot take part."""
    reason, contestant = "", None
    gradients: dict[str, Tensor] = {}
    counter = MemoryCounter(torch.device("cpu"))
    try:
        contestant = entrant(case)
        counter.count(contestant.module)
        parameters = contestant.parameters
        hook = contestant.optimizer.register_step_pre_hook(
            lambda *_: gradients.update({name: p.grad for name, p in parameters.items() if p.grad is not None})
        )
        with counter, counting_resharding(counter):
            contestant.step()
        hook.remove()
    except Exception as error:  # whatever it is, it is why this contender is not timed
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if reason := next(filter(None, everywhere(reason)), ""):
        return None, Result(reason=reason)
    error = largest_error(gradients, expected)
    peak = max(everywhere(counter.peak))
    missing = set(expected) - {name for names in everywhere(list(gradients)) for name in names}
    if missing or not error <= TOLERANCE:
        return None, Result(reason=f"gradients off by {error:.1e}, missing {len(missing)}", error=error)
    return contestant, Result(peak=peak, error=error)


def largest_error(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Over all ranks; infinite where a gradient has another name or shape than any of the plain model's."""
    errors = [0.0]
    for name, gradient in gradients.items():
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        wanted = expected.get(name)
        if wanted is None or wanted.shape != whole.shape:
            errors.append(float("inf"))
        else:
            errors.append(float((whole - wanted).abs().max() / wanted.abs().max()))
    return max(everywhere(max(errors, key=lambda error: (error != error, error))))


def everywhere(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def counting_resharding(counter: MemoryCounter) -> Iterator[None]:
    """FSDP2 empties the storages of gathered weights and fills them again, by no operator that a counter would see."""
    allocate, free = _fsdp_param.alloc_storage, _fsdp_param.free_storage

    def counted(change: Callable[[Tensor], None], tensor: Tensor) -> None:
        before = tensor.untyped_storage().nbytes()
        change(tensor)
        counter.current += tensor.untyped_storage().nbytes() - before
        counter.peak = max(counter.peak, counter.current)

    _fsdp_param.alloc_storage = lambda tensor: counted(allocate, tensor)
    _fsdp_param.free_storage = lambda tensor: counted(free, tensor)
    try:
        yield
    finally:
        _fsdp_param.alloc_storage, _fsdp_param.free_storage = allocate, free
