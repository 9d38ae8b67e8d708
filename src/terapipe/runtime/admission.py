"""Whether a step can begin: each rank checks what it was given, then all ranks agree.

Where it raises, it raises on all ranks, and nothing has changed.
"""

import hashlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from terapipe.modeling.stage import IGNORE
from terapipe.planning.slices import Plan
from terapipe.runtime.executor import Executor
from terapipe.runtime.executors import Executors
from terapipe.runtime.failures import in_words
from terapipe.runtime.inputs import Batch, Documents, Inputs, check_total, lone_checksums
from terapipe.runtime.precision import Autocast
from terapipe.runtime.tied_weights import TiedWeights
from terapipe.runtime.transport import ALL, Transport


class Terms(NamedTuple):
    """One rank's numbers, each within an int64. Zero where a rank has nothing to say."""

    refused: int
    replica: int
    work: int  # checksum of what all ranks of a pipeline must be given alike
    ids: int = 0  # checksum of token ids, and ...
    labels: int = 0  # ... of labels, where a rank has only one of the two
    counted: int = 0  # labels that are not ignored
    tied: int = 0  # copies of the parameter that the first and the last stage share, and ...
    trained: int = 0  # ... how many of them are not frozen


def agree(transport: Transport, mine: Terms, error: Exception | None, description: str) -> list[Terms]:
    """Every rank's terms, if all accept; ``description`` is what ``work`` is the checksum of, in words."""
    found = [Terms(*numbers) for numbers in transport.gather_numbers(mine, ALL)]
    if any(terms.refused for terms in found):
        reasons = transport.gather("" if error is None else in_words(error), ALL)
        if error is not None:
            raise error
        rank = next(i for i, terms in enumerate(found) if terms.refused)
        raise ValueError(f"{transport.name(rank)} refused what it was given: {reasons[rank]}")
    if _differ(found):
        descriptions = transport.gather(description, ALL)
        raise ValueError(_difference(transport, found, descriptions))
    if {(t.replica, t.ids) for t in found if t.ids} & {(t.replica, t.labels) for t in found}:
        raise ValueError(NOT_SHIFTED)
    return found


NOT_SHIFTED = (
    "labels must be the tokens to predict, got the input_ids themselves: labels[b, t] is the token after "
    "input_ids[b, t]; make them with terapipe.next_token_labels(input_ids), and set those to leave out to -100"
)


def _differ(found: list[Terms]) -> bool:
    return len({(terms.replica, terms.work) for terms in found}) > len({terms.replica for terms in found})


def _difference(transport: Transport, found: list[Terms], descriptions: list[str]) -> str:
    """Names the first two ranks of a pipeline that differ."""
    for i, terms in enumerate(found):
        first = next(j for j, other in enumerate(found) if other.replica == terms.replica)
        if terms.work != found[first].work:
            return (
                "all ranks of a pipeline must call the same method with the same plan, documents and shape of batch: "
                f"{transport.name(first)} has {descriptions[first]}, {transport.name(i)} has {descriptions[i]}"
            )
    raise AssertionError("no two ranks differ")


def checksum(data: str | Tensor) -> int:
    """Of 63 bits, never zero."""
    raw = data.encode() if isinstance(data, str) else data.cpu().contiguous().numpy().tobytes()
    return (int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") >> 1) or 1


class ModelChecks:
    """What a model may say of the batches that it is exact with; see Splittable."""

    def __init__(self, model: object) -> None:
        self._slices: Any = getattr(model, "check_slices", lambda shortest, recompute: None)
        self._step: Any = getattr(model, "check_step", lambda **_: None)

    def plan(self, plan: Plan) -> None:
        self._slices(min(map(min, plan.lengths)), plan.recompute)

    def step(self, documents: Documents, *, training: bool, padded: bool) -> None:
        several = any(len(row) > 1 for row in documents)
        self._step(documents=several, training=training, padded=padded)


class Admission:
    def __init__(
        self, inputs: Inputs, checks: ModelChecks, tied: TiedWeights, executors: Executors, transport: Transport
    ) -> None:
        self._inputs, self._checks, self._tied = inputs, checks, tied
        self._executors, self._transport = executors, transport

    def batch(
        self,
        method: str,
        input_ids: Tensor | None,
        labels: Tensor | None,
        documents: Documents | None,
        plan: Plan | None,
        total: float | None,
        *,
        training: bool,
    ) -> Batch:
        """``training``: whether any stage here is in training mode."""
        batch, work, error = None, "", None
        ids = targets = counted = 0
        try:
            batch = self._inputs.take(input_ids, labels, documents, plan)
            self._checks.step(batch.documents, training=training, padded=self._inputs.pads)
            total = check_total(total) if self._inputs.takes_labels else None
            self._executors.get(batch.plan)
            work = f"{method} with {batch.plan} and documents {batch.documents or 'None'}{self._autocast()}"
            ids, targets = lone_checksums(input_ids, labels)
            if batch.labels is not None and self._transport.tp_rank == 0:
                counted = int((batch.labels != IGNORE).sum())
        except Exception as refusal:  # whatever is wrong, the other ranks must hear of it
            error = refusal
        terms = self._agreed(work, error, ids, targets, counted)
        assert batch is not None
        self._tied.check_frozen(terms)
        return batch._replace(scale=self._scale(sum(t.counted for t in terms), total))

    def prompt(self, input_ids: Tensor | None, plan: Plan) -> tuple[Tensor, Executor]:
        """Sequences that text is to follow, filled up, and the executor for their shape."""
        made, work, error = None, "", None
        try:
            padded = self._inputs.prompt(input_ids)
            rows, tokens = padded.shape
            one_slice = Plan((rows,), ((tokens,),), plan.boundaries, plan.order, plan.chunks)
            made = padded, self._executors.make(one_slice)
            work = f"next_token_logits of {rows} rows of {cast(Tensor, input_ids).shape[1]} tokens{self._autocast()}"
        except Exception as refusal:
            error = refusal
        agree(self._transport, Terms(error is not None, self._transport.dp_rank, checksum(work)), error, work)
        assert made is not None
        return made

    def _agreed(self, work: str, error: Exception | None, ids: int, labels: int, counted: int) -> list[Terms]:
        tied, trained = len(self._tied.parameters), self._tied.trained
        here = self._transport.dp_rank
        mine = Terms(error is not None, here, checksum(work), ids, labels, counted, tied, trained)
        return agree(self._transport, mine, error, work)

    def _autocast(self) -> Autocast:
        return Autocast.current(self._transport.device)

    def _scale(self, counted: int, total: float | None) -> Tensor:
        if total is None and not counted:
            raise ValueError(f"at least one label of a batch must count, got only {IGNORE}; leave such a batch out")
        return torch.tensor(1.0 / (total or counted), dtype=self._executors.wide, device=self._transport.device)
