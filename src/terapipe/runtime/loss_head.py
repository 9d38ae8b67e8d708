"""What the last stage makes of its hidden states: losses and their gradients, or values for each token.

The executor calls a ``LossHead`` with the hidden states of one slice after the other. There are two kinds::

    TokenLoss      forward(slice):   logits -> loss -> gradient of the hidden states, at once; logits are gone
                   gradient(slice):  hands that gradient out

    TokenValues    forward(slice):   logits -> values of the tokens; logits are gone
                   (all values are there: somebody computes a loss of them, and its gradient)
                   gradient(slice):  logits again -> values again -> gradient of the hidden states

The second kind computes the head twice. Only so are the logits of one slice in memory at a time, although the loss
needs whole sequences. ``SequenceLosses`` uses it for losses of sequences, ``token_outputs.py`` for losses outside.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from terapipe.losses.objective import HiddenLoss, Loss, Objective, SequenceLoss, Targets, labels_in
from terapipe.losses.tokens import token_log_probs
from terapipe.modeling.slice_cache import longest_document, run_backward
from terapipe.modeling.stage import IGNORE, Autocast, RandomState, Stage
from terapipe.planning.slices import Plan, Slice
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.comm.transport import Transport
from terapipe.scheduling.validation import forwards_come_first

Metrics = dict[str, Tensor]
SliceLoss = Callable[[Stage, Tensor, Targets], Loss]
PerToken: TypeAlias = Callable[[Tensor, Targets], Any]


Documents = Sequence[Sequence[int]]


class Batch(NamedTuple):
    """A batch as an executor runs it: the token ids and targets that this rank needs, and how they are cut.

    ::

        rank                  input_ids           targets
        of the first stage    (batch, seq_len)    None
        of the last stage     None                labels (batch, seq_len), or what the objective wants
        any between           None                None: hidden states come by messages
    """

    plan: Plan
    input_ids: Tensor | None = None
    targets: Targets = None
    documents: Documents = ()
    scale: Tensor | None = None  # what sums over tokens are multiplied by, or means over sequences by each of them
    row_share: Tensor | None = None  # what auxiliary losses are multiplied by for each of their sequences
    tokens: int | None = None  # of each row, if the rest is padding

    @property
    def longest(self) -> int:
        """The length of the longest document, without padding."""
        return longest_document(self.documents, self.tokens or self.plan.seq_len)

    @classmethod
    def made_up(cls, plan: Plan, rank: int, device: torch.device) -> Self:
        """Zeros, for a step that nobody learns from.

        Args:
            plan: whose shape they have.
            rank: of the pipeline; those of the first and the last stage need tokens.
            device: where they are made.
        """
        ids = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.int64, device=device)
        one = torch.ones((), device=device)
        return cls(plan, ids if rank == 0 else None, ids if rank == plan.last_rank else None, (), one, one)

    def targets_of(self, s: Slice) -> Targets:
        """The targets of a slice. Those with one entry for each sequence are cut by sequences only.

        Args:
            s: which slice.
        """
        rows, tokens = slice(s.row, s.row + s.size), slice(s.context, s.end)
        return tree_map(lambda x: x[rows, tokens] if _is_per_token(x, self.plan) else x[rows], self.targets)

    def of_rows(self, rows: slice) -> Targets:
        """The targets of whole sequences.

        Args:
            rows: which sequences.
        """
        return tree_map(lambda x: x[rows], self.targets)


def _is_per_token(x: Tensor, plan: Plan) -> bool:
    return x.ndim > 1 and x.shape[1] == plan.seq_len


class LossHead:
    """Computes losses or values on the last stage in one run. ``begin`` comes first, then ``forward`` with each slice's
    hidden states, and in the slice's backward ``gradient`` with the same."""

    loss: Tensor | None  # of the batch so far, times its scale
    metrics: Metrics

    def begin(self, stage: Stage, batch: Batch, autocast: Autocast, *, train: bool) -> None:
        """Forgets what an earlier run left.

        Args:
            stage: the last one.
            batch: whose targets slices are compared with.
            autocast: what the caller of the run has switched on.
            train: whether gradients will be asked for.
        """
        self._stage, self._batch, self._autocast, self._train = stage, batch, autocast, train
        self.loss = None
        self.metrics = {}

    def forward(self, s: Slice, hidden: Tensor) -> None:
        """Takes the hidden states of a slice.

        Args:
            s: which slice.
            hidden: (size, length, ...), of the last stage.
        """
        raise NotImplementedError

    def gradient(self, s: Slice, hidden: Tensor) -> Tensor:
        """The gradient of the hidden states of a slice.

        Args:
            s: which slice.
            hidden: what ``forward`` was called with.
        """
        raise NotImplementedError

    def hand_over(self, s: Slice) -> Tensor | None:
        """Gives away the gradient that waits for a slice's backward, if there is one: the caller keeps it elsewhere,
        and does not ask for it again.

        Args:
            s: which slice.
        """
        return None

    def try_out(self, hidden: Tensor, few: Slice) -> None:
        """Computes a loss of a few made-up hidden states, after ``begin``. Raises ValueError if it may not be one.

        Args:
            hidden: zeros.
            few: a slice of at most two tokens.
        """

    def _add(self, loss: Tensor, metrics: Mapping[str, Tensor], weight: Tensor) -> None:
        """Adds to the batch's loss, in the dtype of its scale."""
        part = (loss.detach() * weight).to(weight.dtype)
        self.loss = part if self.loss is None else self.loss + part
        for name, value in metrics.items():
            value = (torch.as_tensor(value).detach() * weight).to(weight.dtype)
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value


class TokenLoss(LossHead):
    """A sum over tokens: its gradient is there at once, and the logits of one slice are gone before those of the next
    exist.

    Args:
        slice_loss: from the last stage, hidden states and targets of a slice, the loss.
    """

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
            loss, metrics = scalar(self._slice_loss(self._stage, hidden, self._batch.targets_of(s)), self._train)
            scaled = loss * scale
        if self._train:
            run_backward([scaled])
            self._gradients[s] = _gradient_of_hidden(hidden)
        self._add(loss, metrics, scale)

    def gradient(self, s: Slice, hidden: Tensor) -> Tensor:
        return self._gradients.pop(s)

    def hand_over(self, s: Slice) -> Tensor | None:
        return self._gradients.pop(s)

    def try_out(self, hidden: Tensor, few: Slice) -> None:
        """The loss of two tokens must be the sum of the losses of each."""
        whole = self._try(hidden, few)
        if few.length == 1:
            return
        one, two = (few._replace(context=few.context + i, length=1) for i in range(2))
        again = self._try(hidden, few)
        parts = sum(self._try(hidden[:, :1], s) for s in (one, two))
        # A loss that draws random numbers differs from call to call, and cannot be compared.
        same = math.isclose(whole, parts, rel_tol=0.05, abs_tol=1e-6)
        if math.isclose(whole, again) and math.isfinite(parts) and not same:
            raise ValueError(
                "the loss of a slice must be the sum over its tokens, so that losses of slices add up, got "
                f"{whole:.4g} for two tokens that have {parts:.4g} in sum when each is alone; do not take a mean "
                "(reduction='sum'): the step divides by the number of labels in the whole batch"
            )

    def _try(self, hidden: Tensor, few: Slice) -> float:
        with self._autocast.on():
            returned = self._slice_loss(self._stage, hidden, self._batch.targets_of(few))
        return scalar(returned, hidden.requires_grad)[0].item()


class TokenValues(LossHead):
    """Values for each token, whose gradients come from outside before the first backward, or never.

    Args:
        per_token: from logits and targets of a slice, its values: a tensor or a tree of tensors. None for the hidden
            states themselves.
        place: the only token of each row that gets values; by default all do.
    """

    def __init__(self, per_token: PerToken | None, place: int | None = None) -> None:
        self.per_token, self.place = per_token, place

    def begin(self, stage: Stage, batch: Batch, autocast: Autocast, *, train: bool) -> None:
        super().begin(stage, batch, autocast, train=train)
        self._values: dict[int, list[Any]] = {}  # by microbatch, for each slice
        self._gradients: dict[int, Any] = {}
        self._random: dict[Slice, RandomState] = {}

    def forward(self, s: Slice, hidden: Tensor) -> None:
        if self._train:
            self._random[s] = RandomState.now(hidden.device)
        with torch.no_grad():
            self._values.setdefault(s.microbatch, []).append(self.values_of(s, hidden))

    def values_of(self, s: Slice, hidden: Tensor) -> Any:
        """The values of a slice.

        Args:
            s: which slice.
            hidden: its hidden states.
        """
        if self.per_token is None:
            return hidden
        length = s.length if self.place is None else 1
        with self._autocast.on():
            scores = logits(self._stage, hidden) if self.place is None else self._logits_at(self.place, hidden)
            values = self.per_token(scores, self._batch.targets_of(s))
        for leaf in tree_leaves(values):
            if not isinstance(leaf, Tensor) or leaf.shape[:2] != (s.size, length):
                got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                raise ValueError(
                    f"per_token must return tensors with a value for each token, ({s.size}, {length}, ...), got {got}"
                )
        return values

    def _logits_at(self, place: int, hidden: Tensor) -> Tensor:
        """Where devices share out the tokens, each has some of the places, one of them this one; all give one."""
        owner, index = divmod(place, hidden.shape[1])
        return logits(self._stage, hidden[:, index : index + 1])[:, owner : owner + 1]

    def is_whole(self, microbatch: int) -> bool:
        """Whether all slices of a microbatch are through.

        Args:
            microbatch: its number.
        """
        return len(self._values.get(microbatch, ())) == len(self._batch.plan.lengths[microbatch])

    def join(self, microbatches: Sequence[int]) -> Any:
        """The values of some microbatches, (rows, seq_len, ...), which are then forgotten.

        Args:
            microbatches: their numbers.
        """
        return _concatenate([_concatenate(self._values.pop(m), 1) for m in microbatches], 0)

    def join_all(self) -> Any:
        """Returns the values of all microbatches, (batch_size, seq_len, ...), which are then forgotten."""
        return self.join(sorted(self._values))

    def set_gradients(self, gradients: Any, microbatches: Sequence[int] | None = None) -> None:
        """Takes the gradients of the values.

        Args:
            gradients: of the form of the values, (rows, seq_len, ...).
            microbatches: of which they are; by default all.
        """
        numbers = range(len(self._batch.plan.sizes)) if microbatches is None else microbatches
        leaves, form = tree_flatten(gradients)
        split = [torch.split(leaf, [self._batch.plan.sizes[m] for m in numbers]) for leaf in leaves]
        for i, m in enumerate(numbers):
            self._gradients[m] = tree_unflatten([part[i] for part in split], form)

    def gradient(self, s: Slice, hidden: Tensor) -> Tensor:
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad(), self._random.pop(s).restored():
            values = self.values_of(s, hidden)
        wanted = self._gradients[s.microbatch]
        pairs = zip(tree_leaves(values), tree_leaves(wanted), strict=True)
        roots = [(v, g[:, s.context : s.end]) for v, g in pairs if v.requires_grad]
        if not roots:
            raise ValueError("per_token must return values with a gradient, got none; do not detach all of them")
        run_backward([v for v, _ in roots], [g.to(v.dtype) for v, g in roots])
        if s.context == 0:
            del self._gradients[s.microbatch]
        return _gradient_of_hidden(hidden)


class SequenceLosses(LossHead):
    """A function of whole sequences, called as soon as the last of their values is there.

    Args:
        objective: the function, what it is given of each token, and how many sequences it sees at once.
    """

    def __init__(self, objective: SequenceLoss) -> None:
        self._objective = objective
        self._values = TokenValues(objective.per_token or token_log_probs)

    def begin(self, stage: Stage, batch: Batch, autocast: Autocast, *, train: bool) -> None:
        super().begin(stage, batch, autocast, train=train)
        self._values.begin(stage, batch, autocast, train=train)

    def forward(self, s: Slice, hidden: Tensor) -> None:
        self._values.forward(s, hidden)
        if s.end < self._batch.plan.seq_len:
            return
        microbatches = range(len(self._batch.plan.sizes))
        if self._objective.over == "microbatch":
            self._evaluate([s.microbatch], slice(s.row, s.row + s.size))
        elif all(map(self._values.is_whole, microbatches)):
            self._evaluate(microbatches, slice(0, self._batch.plan.batch_size))

    def gradient(self, s: Slice, hidden: Tensor) -> Tensor:
        return self._values.gradient(s, hidden)

    def _evaluate(self, microbatches: Sequence[int], rows: slice) -> None:
        joined = self._values.join(microbatches)
        values = tree_map(lambda x: x.requires_grad_(self._train and x.is_floating_point()), joined)
        assert self._batch.scale is not None
        weight = self._batch.scale * (rows.stop - rows.start)
        loss, metrics = scalar(self._objective.fn(values, self._batch.of_rows(rows)), self._train, SEQUENCES)
        if self._train:
            (loss * weight).backward()
            self._values.set_gradients(tree_map(_gradient_or_zeros, values), microbatches)
        self._add(loss, metrics, weight)

    def try_out(self, hidden: Tensor, few: Slice) -> None:
        """The function is called with zeros in the shape of real values."""
        first, train, plan = self._values.values_of(few, hidden), hidden.requires_grad, self._batch.plan
        for rows in set(plan.sizes) if self._objective.over == "microbatch" else {plan.batch_size}:
            zeros = tree_map(lambda x, rows=rows: x.new_zeros(rows, plan.seq_len, *x.shape[2:]), first)
            values = tree_map(lambda x: x.requires_grad_(train and x.is_floating_point()), zeros)
            scalar(self._objective.fn(values, self._batch.of_rows(slice(0, rows))), train, SEQUENCES)


class LossSetup:
    """What a pipeline is trained for: its loss head, whether model and plan can follow it, and its metrics.

    Args:
        objective: the ``loss_fn`` of Pipeline.
        stages: those of this rank.
        plan: the pipeline's own.
        transport: to the other ranks.
        shard: whether replicas share out parameters.
    """

    def __init__(
        self, objective: Objective | None, stages: dict[int, Stage], plan: Plan, transport: Transport, shard: bool
    ) -> None:
        self.objective, self._transport = objective, transport
        self._stages, self._last = stages, stages.get(plan.num_stages - 1)
        self.head = loss_head_for(objective)
        # Where operators or parameters are split, a head cannot be called by one rank alone.
        self._untried = objective is not None and transport.tp_size == 1 and not shard
        if objective is not None:
            self._check_kind()
        elif self._last is not None and self._last.no_default_loss:
            raise ValueError(self._last.no_default_loss)
        self.check_plan(plan)
        self._check_tokens()
        self._metrics: dict[str, Tensor] = {}  # of the last step or evaluation

    def _check_tokens(self) -> None:
        parts = self._transport.tp_size
        named, stage = list(self._first.auxiliary_losses), self._first
        if named and parts > 1 and stage.hidden_shape(1, parts)[1] < parts:
            raise ValueError(
                f"sums of auxiliary losses ({', '.join(named)}) are of all tokens, which tensor parallel ranks of this "
                f"model share out; take tp 1, or slice lengths that are no multiples of {parts}"
            )

    def _check_kind(self) -> None:
        is_hidden = isinstance(self.objective, HiddenLoss)
        if not is_hidden and not isinstance(self.objective, SequenceLoss) and not callable(self.objective):
            raise ValueError(
                "loss_fn must be a function (logits, targets), a HiddenLoss or a SequenceLoss, got "
                f"{type(self.objective).__name__}"
            )
        _refuse_maker(self.objective)
        if is_hidden and self._transport.tp_size > 1:
            raise ValueError("a HiddenLoss needs the head in one piece, which tensor parallel splits; take tp 1")
        if self._last is None:
            return
        if not self._last.offers("before_head" if is_hidden else "logits"):
            method = "before_head(hidden)" if is_hidden else "logits(hidden)"
            raise ValueError(
                f"this objective needs a last stage with a method {method}, {type(self._last).__name__} has none"
            )

    def check_plan(self, plan: Plan) -> None:
        """All ranks check the whole plan, so that all refuse it."""
        wanting = [name for name, loss in self._first.auxiliary_losses.items() if loss.over != "microbatch"]
        if isinstance(self.objective, SequenceLoss) and self.objective.over == "batch":
            wanting.append("loss_fn")
        if wanting and not forwards_come_first(plan):
            raise ValueError(
                f"{' and '.join(wanting)} {'needs' if len(wanting) == 1 else 'need'} the whole batch before the first "
                f"backward, which the order {plan.order!r} does not wait for with {len(plan.sizes)} microbatches; take "
                "over='microbatch', an order such as 'terapipe' or 'gpipe', or a plan with one microbatch"
            )

    def check_outputs(self, plan: Plan) -> None:
        """Whether backwards can wait for gradients from outside."""
        named = list(self._first.auxiliary_losses)
        if named:
            raise ValueError(
                f"token_outputs does not know what the model's own losses ({', '.join(named)}) weigh beside a loss of "
                "its outputs; turn them off (output_router_logits=False), or use step"
            )
        if not forwards_come_first(plan):
            raise ValueError(
                f"token_outputs needs all forwards before the first backward, which the order {plan.order!r} does not "
                f"wait for with {len(plan.sizes)} microbatches; take an order such as 'terapipe' or 'gpipe'"
            )

    @property
    def _first(self) -> Stage:
        return next(iter(self._stages.values()))

    def try_out(self, batch: Batch, dtype: torch.dtype, *, train: bool) -> None:
        """Calls the objective with made-up hidden states of a few tokens, before the first step, to refuse what it
        returns before anything is sent. Nothing changes by it.

        Args:
            batch: the first, where the last stage is.
            dtype: that of hidden states.
            train: whether gradients will be needed.
        """
        if not self._untried or self._last is None:
            return
        stage, device = self._last, next(iter(tree_leaves(batch.targets))).device
        few = Slice(0, 0, 0, 1, _first_pair(batch), min(2, batch.plan.seq_len))
        hidden = torch.zeros(stage.hidden_shape(few.size, few.length), dtype=dtype, device=device)
        self.head.begin(stage, batch, Autocast.current(device), train=train)
        with RandomState.now(device).restored(), torch.set_grad_enabled(train):
            self.head.try_out(hidden.requires_grad_(train), few)
        self._untried = not train

    @property
    def warm_up_head(self) -> LossHead:
        """A head for a step on made-up numbers: an objective of the user may not be called with targets that it does
        not know, so the sum of the logits stands for it. The head is run and differentiated all the same."""
        if self.objective is None:
            return TokenLoss(default_loss)
        return TokenLoss(lambda stage, hidden, targets: logits(stage, hidden).sum())

    def set_metrics(self, metrics: Metrics) -> None:
        """Takes those of a step or an evaluation.

        Args:
            metrics: of this replica, where the last stage is.
        """
        self._metrics = metrics

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last step on every rank, summed over replicas: each replica's are weighted as its
        loss is. All ranks call it together; the host waits for the device here, which is why no step does it."""
        total: dict[str, float] = {}
        mine = {name: float(value) for name, value in self._metrics.items()} if self._transport.tp_rank == 0 else {}
        for metrics in self._transport.gather(mine, ALL):
            for name, value in metrics.items():
                total[name] = total.get(name, 0.0) + value
        return total


def _refuse_maker(objective: Objective | None) -> None:
    """A function that makes an objective, such as ``losses.dpo``, is easily given in place of what it makes."""
    function = objective.fn if isinstance(objective, HiddenLoss | SequenceLoss) else objective
    arguments = (None,) * (3 if isinstance(objective, HiddenLoss) else 2)
    try:
        inspect.signature(cast(Callable[..., object], function)).bind(*arguments)
    except TypeError:
        raise ValueError(
            f"an objective is called with {'(hidden, head, targets)' if len(arguments) > 2 else '(logits, targets)'}, "
            f"which {getattr(function, '__name__', function)} does not take; if it makes a loss function, call it"
        ) from None
    except ValueError:  # built-in functions do not say what they take
        pass


def default_loss(stage: Stage, hidden: Tensor, targets: Targets) -> Tensor:
    """The stage's own loss, by default cross-entropy."""
    return stage.loss(hidden, targets)


def loss_head_for(objective: Objective | None) -> LossHead:
    """The head that computes an objective; without one, the stage's own loss.

    Args:
        objective: a function of logits, a HiddenLoss or a SequenceLoss.
    """
    if objective is None:
        return TokenLoss(default_loss)
    if isinstance(objective, SequenceLoss):
        return SequenceLosses(objective)
    if isinstance(objective, HiddenLoss):
        fn = objective.fn
        return TokenLoss(lambda stage, hidden, targets: fn(*stage.before_head(hidden), targets))
    loss_fn = objective
    return TokenLoss(lambda stage, hidden, targets: loss_fn(logits(stage, hidden), targets))


def logits(stage: Stage, hidden: Tensor) -> Tensor:
    """Returns logits of all tokens in one piece: where operators are split, every rank gets the whole vocabulary."""
    scores = stage.logits(hidden)
    return scores.full_tensor() if isinstance(scores, DTensor) else scores


def logits_alone(scores: Tensor, _: Targets) -> Tensor:
    """A ``per_token`` whose values are the logits."""
    return scores


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


def _gradient_of_hidden(hidden: Tensor) -> Tensor:
    if hidden.grad is None:
        raise ValueError("the objective has no gradient with respect to the hidden states; do not detach the logits")
    return hidden.grad


def _gradient_or_zeros(leaf: Tensor) -> Tensor:
    """Zeros for values that the function does not use."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _concatenate(parts: Sequence[Any], dim: int) -> Any:
    """Concatenates trees of the same form, leaf by leaf."""
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
