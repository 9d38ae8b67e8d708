"""Values of tokens, computed by the forwards of a pipeline and sent to all its ranks; differentiable if wanted.

One mechanism serves four methods of ``Pipeline``: ``token_outputs`` itself, ``log_probs`` (it without gradients),
``hidden_states`` (the values are what the head would get) and ``next_token_logits`` (only the last place has values)::

    forwards of all slices -> TokenValues on the last stage -> broadcast -> values, on every rank
                                                                               |  any loss, the same on every rank
    backwards of all slices <- TokenValues.set_gradients <- gradients <--------+  loss.backward()
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from terapipe.modeling.stage import Stage
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.executor import Executor
from terapipe.runtime.executors import Executors
from terapipe.runtime.gradient_sync import GradientSync
from terapipe.runtime.loss_head import Batch, PerToken, TokenValues
from terapipe.runtime.module_states import ModuleStates
from terapipe.runtime.random_state import share_random_state

Format = list[tuple[str, tuple[int, ...], torch.dtype]]  # name, shape after (rows, tokens), dtype; one "" if unnamed


class TokenOutputs:
    """What a pipeline needs for values of tokens, beside what it trains with.

    Args:
        last_rank: that of the last stage.
        executors: run the batches.
        sync: is told when forwards are through.
        transport: to the other ranks.
    """

    def __init__(self, last_rank: int, executors: Executors, sync: GradientSync, transport: Transport) -> None:
        self._last_rank, self._executors, self._sync, self._transport = last_rank, executors, sync, transport
        self._formats: dict[PerToken | None, Format] = {}
        self._checked: set[bool] = set()  # what the last stage was asked
        self._states: ModuleStates | None = None  # of the stages in the last forward that a backward follows

    def check_logits(self, last: Stage | None, *, of_tokens: bool = True) -> None:
        """Asks the last stage once whether it has logits. Refused on all ranks alike, before anything is sent: the
        pipeline can go on training.

        Args:
            last: the last stage, where it is.
            of_tokens: whether logits are to be those of a vocabulary, not of classes.
        """
        if of_tokens in self._checked:
            return
        missing = "" if last is None or last.offers("logits") else type(last).__name__
        if of_tokens and last is not None and last.no_default_loss:
            missing = "a sequence classifier, which predicts no tokens,"
        name = next(filter(None, self._transport.gather(missing)), None)
        if name:
            raise ValueError(
                f"logits and log-probabilities need a last stage with a method logits(hidden), as terapipe.Stage "
                f"describes it; {name} has none"
            )
        self._checked |= {of_tokens, False}

    def forwards(self, batch: Batch, executor: Executor, head: TokenValues, *, train: bool) -> None:
        """Runs the forwards of a batch.

        Args:
            batch: what to run.
            executor: that of its plan.
            head: collects the values where the last stage is.
            train: whether backwards follow. What they need stays in memory.
        """
        if train:
            self._executors.begin(batch.plan)
            if self._transport.tp_size > 1:
                share_random_state(self._transport)
            executor.forwards(batch, head)
            return
        last, self._executors.current = self._executors.current, executor  # which tells where this rank stands
        try:
            executor.run(batch, head, train=False)
        finally:
            self._executors.current = last
        if not any(other.is_pending for other in self._executors.recent):  # their backwards need whole parameters
            self._sync.finish()

    def backwards(self, batch: Batch, executor: Executor, head: TokenValues, gradients: dict[str, Tensor]) -> None:
        """Runs the backwards of a batch whose forwards have run.

        Args:
            batch: what ``forwards`` ran.
            executor: which ran it.
            head: which collected its values.
            gradients: of the values, by name.
        """
        if self._transport.rank == self._last_rank:
            head.set_gradients(without_names(gradients))
        executor.backwards(batch)
        self._sync.finish()

    def states(self, stages: Mapping[int, Stage]) -> ModuleStates:
        """The stages' modules as they are now, for backwards, which compute parts of the forwards again.

        Args:
            stages: those of this rank.
        """
        if self._states is None or not self._states.is_current():
            self._states = ModuleStates(stages.values())
        return self._states

    def broadcast(self, batch: Batch, head: TokenValues) -> dict[str, Tensor]:
        """Sends the values from the last stage to all ranks of its pipeline. Their shapes and dtypes are told once for
        each function that makes them.

        Args:
            batch: what was run.
            head: which has the values.

        Returns:
            The values by name; a single tensor has an empty name.
        """
        is_last = self._transport.rank == self._last_rank
        here = _by_name(head.join_all()) if is_last else {}
        if head.per_token not in self._formats:
            mine = [(name, tuple(x.shape[2:]), x.dtype) for name, x in here.items()]
            self._formats[head.per_token] = self._transport.gather(mine)[self._last_rank]
        rows, tokens = batch.plan.batch_size, batch.plan.seq_len if head.place is None else 1
        values = {}
        for name, shape, dtype in self._formats[head.per_token]:
            if is_last:
                value = here[name].contiguous()
            else:
                value = torch.empty(rows, tokens, *shape, dtype=dtype, device=self._transport.device)
            numbers = value.view(torch.uint8) if dtype is torch.bool else value  # gloo sends no booleans
            self._transport.broadcast(numbers, self._last_rank, "values of tokens")
            values[name] = value
        return values


def _by_name(values: Any) -> dict[str, Tensor]:
    return dict(values) if isinstance(values, Mapping) else {"": values}


def without_names(values: dict[str, Tensor]) -> Any:
    """Returns values in the form that the user's function returned them: a tensor, or a dict.

    Args:
        values: by name.
    """
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
        pairs = zip(gradients, ctx.values, strict=True)
        ctx.on_backward([torch.zeros_like(value) if gradient is None else gradient for gradient, value in pairs])
        return None, None, None


def with_backward(values: dict[str, Tensor], backward: Callable[[dict[str, Tensor]], None]) -> dict[str, Tensor]:
    """The values as outputs of a differentiable operation.

    Args:
        values: by name.
        backward: is called with their gradients, once.
    """
    anchor = torch.zeros((), requires_grad=True)
    names = list(values)
    has_run = False

    def call_by_name(gradients: list[Tensor]) -> None:
        nonlocal has_run
        if has_run:  # refused before anything is computed or sent, so that the pipeline can be used on
            raise ValueError(
                "backward() of these values ran already, and a pipeline keeps nothing for a second one, also with "
                "retain_graph=True; add up all losses of one forward and call backward() once, or compute the values "
                "again"
            )
        backward(dict(zip(names, gradients, strict=True)))
        has_run = True

    joined = _Differentiable.apply(anchor, list(values.values()), call_by_name)  # type: ignore[no-untyped-call]
    return dict(zip(names, joined, strict=True))
