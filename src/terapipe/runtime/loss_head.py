"""What the last stage makes of its hidden states: losses and their gradients, or values for each token."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from terapipe.losses.objective import HiddenLoss, Loss, Objective, SequenceLoss, Targets, labels_in
from terapipe.losses.tokens import token_log_probs
from terapipe.modeling.autocast import Autocast
from terapipe.modeling.random_state import RandomState
from terapipe.modeling.slice_cache import run_backward
from terapipe.modeling.stage import IGNORE, Stage
from terapipe.planning.slices import Slice
from terapipe.runtime.inputs import Batch

Metrics = dict[str, Tensor]


class OutputHead(Protocol):
    """Of one run. The executor calls ``forward`` with each slice's hidden states, and in the slice's backward
    ``gradient`` with the same."""

    loss: Tensor | None  # of the batch so far, times its scale
    metrics: Metrics

    def begin(self, stage: Stage, batch: Batch, autocast: Autocast, *, train: bool) -> None: ...

    def forward(self, s: Slice, hidden: Tensor) -> None: ...

    def gradient(self, s: Slice, hidden: Tensor) -> Tensor: ...


SliceLoss = Callable[[Stage, Tensor, Targets], Loss]


class _Base:
    _autocast = Autocast("", None)

    def begin(self, stage: Stage, batch: Batch, autocast: Autocast, *, train: bool) -> None:
        self._stage, self._batch, self._autocast, self._train = stage, batch, autocast, train
        self.loss: Tensor | None = None
        self.metrics: Metrics = {}

    def gradient(self, s: Slice, hidden: Tensor) -> Tensor:
        raise NotImplementedError("by forwards only")

    def _add(self, loss: Tensor, metrics: Mapping[str, Tensor], weight: Tensor) -> None:
        """To the batch's loss, in the dtype of its scale."""
        part = (loss.detach() * weight).to(weight.dtype)
        self.loss = part if self.loss is None else self.loss + part
        for name, value in metrics.items():
            value = (torch.as_tensor(value).detach() * weight).to(weight.dtype)
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value


class TokenLosses(_Base):
    """A sum over tokens: its gradient is known at once, and the logits of one slice are gone before those of the next
    exist."""

    def __init__(self, slice_loss: SliceLoss) -> None:
        self._slice_loss = slice_loss

    def begin(self, stage: Stage, batch: Batch, autocast: Autocast, *, train: bool) -> None:
        super().begin(stage, batch, autocast, train=train)
        self._gradients: dict[Slice, Tensor] = {}

    def forward(self, s: Slice, hidden: Tensor) -> None:
        hidden = hidden.detach().requires_grad_(self._train)
        scale = self._batch.scale
        assert scale is not None
        with self._autocast.on():
            loss, metrics = scalar(self._slice_loss(self._stage, hidden, self._batch.cut(s)), self._train)
            scaled = loss * scale
        if self._train:
            run_backward([scaled])
            self._gradients[s] = _found(hidden)
        self._add(loss, metrics, scale)

    def gradient(self, s: Slice, hidden: Tensor) -> Tensor:
        return self._gradients.pop(s)

    def try_out(self, stage: Stage, batch: Batch, hidden: Tensor, few: Slice) -> None:
        whole = self._try(stage, batch, hidden, few)
        if few.length == 1:
            return
        one, two = (few._replace(context=few.context + i, length=1) for i in range(2))
        again = self._try(stage, batch, hidden, few)
        parts = sum(self._try(stage, batch, hidden[:, :1], s) for s in (one, two))
        # A loss that draws random numbers differs from call to call, and cannot be compared.
        same = math.isclose(whole, parts, rel_tol=0.05, abs_tol=1e-6)
        if math.isclose(whole, again) and math.isfinite(parts) and not same:
            raise ValueError(
                "the loss of a slice must be the sum over its tokens, so that losses of slices add up, got "
                f"{whole:.4g} for two tokens that have {parts:.4g} in sum when each is alone; do not take a mean "
                "(reduction='sum'): the step divides by the number of labels in the whole batch"
            )

    def _try(self, stage: Stage, batch: Batch, hidden: Tensor, few: Slice) -> float:
        with self._autocast.on():
            returned = self._slice_loss(stage, hidden, batch.cut(few))
        return scalar(returned, hidden.requires_grad)[0].item()


class _TwoPhases(_Base):
    """Forwards collect values for each token. Backwards make the values of a slice again, and know the gradients that
    the values of whole sequences have got meanwhile."""

    def __init__(self, per_token: Callable[[Tensor, Targets], Any]) -> None:
        self._per_token = per_token

    def begin(self, stage: Stage, batch: Batch, autocast: Autocast, *, train: bool) -> None:
        super().begin(stage, batch, autocast, train=train)
        self._values: dict[int, list[Any]] = {}  # by microbatch, for each slice
        self._gradients: dict[int, Any] = {}
        self._random: dict[Slice, RandomState] = {}

    def forward(self, s: Slice, hidden: Tensor) -> None:
        if self._train:
            self._random[s] = RandomState.now(hidden.device)
        with torch.no_grad():
            self._values.setdefault(s.microbatch, []).append(self._values_of(s, hidden))

    def _values_of(self, s: Slice, hidden: Tensor) -> Any:
        with self._autocast.on():
            values = self._per_token(logits(self._stage, hidden), self._batch.cut(s))
        for leaf in tree_leaves(values):
            if not isinstance(leaf, Tensor) or leaf.shape[:2] != (s.size, s.length):
                got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(
                    f"per_token must return tensors with a value for each token, ({s.size}, {s.length}, ...), got {got}"
                )
        return values

    def _join(self, microbatches: Sequence[int]) -> Any:
        return _joined([_joined(self._values.pop(m), 1) for m in microbatches], 0)

    def _keep_gradients(self, microbatches: Sequence[int], gradients: Any) -> None:
        sizes = [self._batch.plan.sizes[m] for m in microbatches]
        leaves, form = tree_flatten(gradients)
        split = [torch.split(leaf, sizes) for leaf in leaves]
        for i, m in enumerate(microbatches):
            self._gradients[m] = tree_unflatten([part[i] for part in split], form)

    def gradient(self, s: Slice, hidden: Tensor) -> Tensor:
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad(), self._random.pop(s).restored():
            values = self._values_of(s, hidden)
        wanted = self._gradients[s.microbatch]
        pairs = zip(tree_leaves(values), tree_leaves(wanted), strict=True)
        roots = [(v, g[:, s.context : s.end]) for v, g in pairs if v.requires_grad]
        if not roots:
            raise ValueError("per_token must return values with a gradient, got none; do not detach all of them")
        run_backward([v for v, _ in roots], [g.to(v.dtype) for v, g in roots])
        if s.context == 0:
            del self._gradients[s.microbatch]
        return _found(hidden)


class SequenceLosses(_TwoPhases):
    """A function of whole sequences, called with the last of their values."""

    def __init__(self, objective: SequenceLoss) -> None:
        super().__init__(objective.per_token or token_log_probs)
        self._objective = objective

    def forward(self, s: Slice, hidden: Tensor) -> None:
        super().forward(s, hidden)
        if s.end < self._batch.plan.seq_len:
            return
        waiting = self._values
        if self._objective.over == "microbatch":
            self._evaluate([s.microbatch], slice(s.row, s.row + s.size))
        elif len(waiting) == len(self._batch.plan.sizes) and all(map(self._is_whole, waiting)):
            self._evaluate(sorted(waiting), slice(0, self._batch.plan.batch_size))

    def _is_whole(self, microbatch: int) -> bool:
        return len(self._values[microbatch]) == len(self._batch.plan.lengths[microbatch])

    def _evaluate(self, microbatches: Sequence[int], rows: slice) -> None:
        joined = self._join(microbatches)
        values = tree_map(lambda x: x.requires_grad_(self._train and x.is_floating_point()), joined)
        assert self._batch.scale is not None
        weight = self._batch.scale * (rows.stop - rows.start)
        loss, metrics = scalar(self._objective.fn(values, self._batch.of_rows(rows)), self._train, SEQUENCES)
        if self._train:
            (loss * weight).backward()
            self._keep_gradients(microbatches, tree_map(_gradient_of, values))
        self._add(loss, metrics, weight)

    def try_out(self, stage: Stage, batch: Batch, hidden: Tensor, few: Slice) -> None:
        self._stage, self._batch = stage, batch
        first, train, plan = self._values_of(few, hidden), hidden.requires_grad, batch.plan
        for rows in set(plan.sizes) if self._objective.over == "microbatch" else {plan.batch_size}:
            zeros = tree_map(lambda x, rows=rows: x.new_zeros(rows, plan.seq_len, *x.shape[2:]), first)
            values = tree_map(lambda x: x.requires_grad_(train and x.is_floating_point()), zeros)
            scalar(self._objective.fn(values, batch.of_rows(slice(0, rows))), train, SEQUENCES)


class TokenOutputs(_TwoPhases):
    """Values for each token of the batch, whose gradients come from outside before the first backward."""

    def collected(self) -> Any:
        """(batch, seq_len, ...)."""
        return self._join(sorted(self._values))

    def set_gradients(self, gradients: Any) -> None:
        """Of the form of the values."""
        self._keep_gradients(range(len(self._batch.plan.sizes)), gradients)


class TokenValues(_Base):
    """The values of all tokens, by forwards only: by default the hidden states themselves."""

    def __init__(self, per_token: Callable[[Tensor, Targets], Tensor] | None = None) -> None:
        """``per_token`` gets logits."""
        self._per_token = per_token

    def begin(self, stage: Stage, batch: Batch, autocast: Autocast, *, train: bool) -> None:
        super().begin(stage, batch, autocast, train=train)
        self._values: dict[int, list[Tensor]] = {}

    def forward(self, s: Slice, hidden: Tensor) -> None:
        if self._per_token is not None:
            with self._autocast.on():
                hidden = self._per_token(logits(self._stage, hidden), self._batch.cut(s))
        self._values.setdefault(s.microbatch, []).append(hidden)

    def collected(self) -> Tensor:
        """(batch, seq_len, ...)."""
        return torch.cat([torch.cat(self._values[m], 1) for m in sorted(self._values)])


class LastHidden(_Base):
    """The hidden states of the last slice, by forwards only; None where the last stage is not."""

    hidden: Tensor | None = None

    def forward(self, s: Slice, hidden: Tensor) -> None:
        self.hidden = hidden


def default_loss(stage: Stage, hidden: Tensor, targets: Targets) -> Tensor:
    return stage.loss(hidden, targets)


def output_head_for(objective: Objective | None) -> "TokenLosses | SequenceLosses":
    if objective is None:
        return TokenLosses(default_loss)
    if isinstance(objective, SequenceLoss):
        return SequenceLosses(objective)
    if isinstance(objective, HiddenLoss):
        fn = objective.fn
        return TokenLosses(lambda stage, hidden, targets: fn(*stage.before_head(hidden), targets))
    loss_fn = objective
    return TokenLosses(lambda stage, hidden, targets: loss_fn(logits(stage, hidden), targets))


def logits(stage: Stage, hidden: Tensor) -> Tensor:
    """Of all tokens, in one piece: where operators are split, every rank gets the whole vocabulary."""
    found = stage.logits(hidden)
    return found.full_tensor() if isinstance(found, DTensor) else found


TOKENS, SEQUENCES = "sum over the tokens of the slice", "take the mean over sequences"


def scalar(returned: Loss, train: bool, remedy: str = TOKENS) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss and metrics that an objective returned, if it may be that."""
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(loss, Tensor) or loss.ndim or not isinstance(metrics, Mapping):
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"an objective must return a scalar tensor, or a tuple of it and a dict of metrics, got {got}; {remedy}"
        )
    for name, value in metrics.items():
        if torch.as_tensor(value).numel() != 1:
            raise ValueError(f"the metric {name!r} must be one number, got shape {tuple(value.shape)}; {remedy}")
    if train and not loss.requires_grad:
        raise ValueError(
            "an objective must return a loss with a gradient, got one that does not depend on the model's output; do "
            "not detach it, nor compute it under torch.no_grad()"
        )
    return loss, metrics


def _found(hidden: Tensor) -> Tensor:
    if hidden.grad is None:
        raise ValueError("the objective has no gradient with respect to the hidden states; do not detach the logits")
    return hidden.grad


def _gradient_of(leaf: Tensor) -> Tensor:
    """Zeros for values that the function does not use."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _joined(parts: Sequence[Any], dim: int) -> Any:
    """Of trees of the same form, leaf by leaf."""
    leaves = [tree_leaves(part) for part in parts]
    form = tree_flatten(parts[0])[1]
    return tree_unflatten([torch.cat(columns, dim) for columns in zip(*leaves, strict=True)], form)


def _first_pair(batch: Batch) -> int:
    """Where the first two neighboring labels lie that count; 0 if there are none."""
    labels = labels_in(batch.targets)
    if labels is None or labels.ndim != 2 or labels.shape[1] < 2:
        return 0
    counted = labels[0] != IGNORE
    return int((counted[:-1] & counted[1:]).int().argmax())


def try_out(
    output_head: "TokenLosses | SequenceLosses", stage: Stage, batch: Batch, dtype: torch.dtype, *, train: bool
) -> None:
    """Calls an objective with made-up hidden states of a few tokens, to refuse what it returns before anything is
    sent. Nothing changes by it."""
    device = next(iter(tree_leaves(batch.targets))).device
    few = Slice(0, 0, 0, 1, _first_pair(batch), min(2, batch.plan.seq_len))
    hidden = torch.zeros(stage.hidden_shape(few.size, few.length), dtype=dtype, device=device)
    output_head._autocast = Autocast.current(device)
    with RandomState.now(device).restored(), torch.set_grad_enabled(train):
        output_head.try_out(stage, batch, hidden.requires_grad_(train), few)
