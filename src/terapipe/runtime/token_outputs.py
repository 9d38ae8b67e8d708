"""Values for each token as a differentiable operation: forwards of a pipeline compute them, and ``backward()`` runs its
backwards."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from terapipe.losses.objective import Targets
from terapipe.losses.tokens import token_log_probs
from terapipe.modeling.main_grads import is_half, summed_in_float32
from terapipe.modeling.slice_cache import longest_document
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.executor import Executor
from terapipe.runtime.forwards import Forwards
from terapipe.runtime.gradient_sync import (
    earlier_gradients_set_aside,
    hooks_when_complete,
    tensor_hooks_when_complete,
)
from terapipe.runtime.inputs import Batch, Documents
from terapipe.runtime.loss_head import TokenOutputs
from terapipe.runtime.module_states import ModuleStates
from terapipe.runtime.module_tree import named_parameters_of
from terapipe.runtime.preflight import Held
from terapipe.runtime.random_state import share_random_state
from terapipe.runtime.tied_weights import TiedWeights
from terapipe.runtime.zero_gradients import ZeroGradients

PerToken = Callable[[Tensor, Targets], Tensor | Mapping[str, Tensor]]
Described = list[tuple[str, tuple[int, ...], torch.dtype]]  # name, shape after (rows, tokens), dtype; one "" if unnamed


class OutputBroadcast:
    """Sends what the last stage computed to all ranks of its pipeline."""

    def __init__(self, transport: Transport, last_rank: int) -> None:
        self._transport, self._last_rank = transport, last_rank
        self._known: dict[PerToken, Described] = {}

    def __call__(self, per_token: PerToken, head: TokenOutputs, rows: int, tokens: int) -> dict[str, Tensor]:
        """By name; of a single tensor, under an empty name."""
        is_last = self._transport.rank == self._last_rank
        found = _named(head.collected()) if is_last else {}
        if per_token not in self._known:
            mine = [(name, tuple(x.shape[2:]), x.dtype) for name, x in found.items()]
            self._known[per_token] = self._transport.gather(mine)[self._last_rank]
        values = {}
        for name, shape, dtype in self._known[per_token]:
            if is_last:
                value = found[name].contiguous()
            else:
                value = torch.empty(rows, tokens, *shape, dtype=dtype, device=self._transport.device)
            numbers = value.view(torch.uint8) if dtype is torch.bool else value  # gloo sends no booleans
            self._transport.broadcast(numbers, self._last_rank, "values of tokens")
            values[name] = value
        return values


def _named(values: Any) -> dict[str, Tensor]:
    return dict(values) if isinstance(values, Mapping) else {"": values}


def unnamed(values: dict[str, Tensor]) -> Any:
    return values.get("", values)


class _Differentiable(torch.autograd.Function):
    """The values, connected to a function that gets their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: list[Tensor], backward: Callable[[list[Tensor]], None]) -> Any:
        ctx.on_backward, ctx.values = backward, values
        ctx.mark_non_differentiable(*[value for value in values if not value.is_floating_point()])
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        given = zip(gradients, ctx.values, strict=True)
        ctx.on_backward([torch.zeros_like(value) if gradient is None else gradient for gradient, value in given])
        return None, None, None


def with_backward(values: dict[str, Tensor], backward: Callable[[dict[str, Tensor]], None]) -> dict[str, Tensor]:
    """The values as outputs of a differentiable operation, whose backward calls the function with their gradients."""
    anchor = torch.zeros((), requires_grad=True)
    names = list(values)

    has_run = False

    def named(gradients: list[Tensor]) -> None:
        nonlocal has_run
        if has_run:  # refused before anything is computed or sent, so that the pipeline can be used on
            raise ValueError(
                "backward() of these values ran already, and a pipeline keeps nothing for a second one, also with "
                "retain_graph=True; add up all losses of one forward and call backward() once, or compute the values "
                "again"
            )
        backward(dict(zip(names, gradients, strict=True)))
        has_run = True

    joined = _Differentiable.apply(anchor, list(values.values()), named)  # type: ignore[no-untyped-call]
    return dict(zip(names, joined, strict=True))


class TokenOutputSteps(Forwards):
    """A part of ``Pipeline``, which sets what is declared here."""

    device: torch.device
    _tied: TiedWeights
    _is_warm: bool
    _broadcast_outputs: OutputBroadcast
    zero_gradients: ZeroGradients
    _states: ModuleStates | None = None  # of the stages in the last forward that a backward follows

    def warm_up(self, plan: Plan | None = None) -> None:
        raise NotImplementedError

    def token_outputs(
        self,
        input_ids: Tensor | None,
        labels: Tensor | None,
        per_token: PerToken = token_log_probs,
        documents: Documents | None = None,
    ) -> Any:
        """Values for each token of a batch, (rows, tokens, ...), on every rank, as a differentiable operation: any loss
        may be computed from them, and its ``backward()`` runs the backwards of the pipeline. ::

            log_probs = pipe.token_outputs(input_ids, labels)   # forwards
            loss = my_loss(log_probs)                           # the same on every rank
            loss.backward()                                     # gradients are in .grad

        ``per_token(logits, labels)`` makes the values of a slice, a tensor or a dict of tensors, by default the
        log-probability of each label; ``labels`` may be None if it does not need them (it then gets an empty dict).
        Only the logits of one slice exist at a time, unless they are the values; their head runs again in the backward.

        Any number of sequences of any length, cut as the plan cuts its own. All ranks must call it together, with the
        same ``input_ids``, and call ``backward()`` together, before the next forward that needs gradients. The order of
        the plan must have all forwards first. Gradients are summed over replicas. Under ``torch.no_grad()`` there are
        only forwards.
        """
        train = torch.is_grad_enabled()
        training = any(stage.training for stage in self.stages.values())
        last = self.stages.get(self.plan.num_stages - 1)
        self._generation.check(last, of_tokens=per_token is token_log_probs)
        batch, executor = self._admission.outputs(
            input_ids, labels, documents, train=train, training=training, held=Held.of(self)
        )
        if train and self.device.type == "cuda" and not self._is_warm and self._transport.size > 1:
            self.warm_up(batch.plan)
        head = TokenOutputs(per_token)
        given = input_ids if input_ids is not None else labels
        tokens = batch.plan.seq_len if given is None else given.shape[1]
        with self.failing_together(), self._loss_parallel():
            self._forwards(batch, executor, head, tokens, train)
            found = self._broadcast_outputs(per_token, head, batch.plan.batch_size, batch.plan.seq_len)
        if train:
            if self._states is None or not self._states.is_current():
                self._states = ModuleStates(self.stages.values())
            states = self._states
            found = with_backward(found, lambda gradients: self._backwards(batch, executor, head, states, gradients))
        return unnamed({name: value[:, :tokens] for name, value in found.items()})

    def _forwards(self, batch: Batch, executor: Executor, head: TokenOutputs, tokens: int, train: bool) -> None:
        assert self._executors is not None
        longest = longest_document(batch.documents, tokens)
        if not train:
            with self._executors.once(executor):
                executor.run(batch, head, longest=longest, train=False)
            if not any(kept.is_pending for kept in self._executors.kept):  # their backwards need whole parameters
                self._sync.finish()
            return
        self._executors.begin(batch.plan)
        if self._transport.tp_size > 1:
            share_random_state(self._transport)
        executor.forwards(batch, head, longest=longest)

    def _backwards(
        self,
        batch: Batch,
        executor: Executor,
        head: TokenOutputs,
        states: ModuleStates,
        gradients: dict[str, Tensor],
    ) -> None:
        """``states``: of the stages' modules in the forwards, which are computed again in part."""
        executor.check_pending(batch)
        with self.failing_together(), states.restored(), self._gradients_added(), self._loss_parallel():
            if self._transport.rank == self.plan.last_rank:
                head.set_gradients(unnamed(gradients))
            executor.backwards(batch)
            self._sync.finish()

    @contextmanager
    def _gradients_added(self) -> Iterator[None]:
        """Around backwards: what they find is summed over slices, replicas and tied copies, then added to ``.grad``,
        and hooks are called. Where any rank has hooks, all wait for them: an error in one must not come out later."""
        held = [p for _, p in named_parameters_of(self)]
        tied = set(self._tied.parameters)
        summed = [p for p in held if self._sync.sums_in_place or p in tied or is_half(p) or p._backward_hooks]
        with hooks_when_complete(held), earlier_gradients_set_aside(summed), tensor_hooks_when_complete(held):
            with summed_in_float32(held):
                yield
            self._tied.sum_gradients()
            self.zero_gradients.check_parameters(held)  # before hooks, which may use gradients up
        if self._admission.await_hooks:
            self._transport.gather_numbers((0,), ALL)
