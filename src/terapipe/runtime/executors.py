"""The executors of a pipeline: one for each plan. Those of the last few are kept, and share their buffers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from terapipe.modeling.stage import SlicedStage, Stage
from terapipe.planning.slices import Plan
from terapipe.runtime.auxiliary import AuxiliaryLosses
from terapipe.runtime.comm.mesh import DP
from terapipe.runtime.comm.transport import NullTransport, Transport
from terapipe.runtime.executor import CachePool, Executor
from terapipe.runtime.inputs import Batch
from terapipe.runtime.loss_head import LossHead
from terapipe.runtime.messages import MessageFormat, NullFormat

PLANS = 8  # of which executors are kept


class Executors:
    """Makes an executor for each plan, and keeps those of the last few plans.

    Args:
        plan: the pipeline's own.
        stages: those of this rank, by number.
        transport: to the other ranks.
        message_format: what messages look like.
        check: refuses plans that the model cannot follow.
        stage_done: is told when a stage's gradients are complete.
        fused: see ``SlicedStage``.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        transport: Transport,
        message_format: MessageFormat,
        check: Callable[[Plan], None],
        stage_done: Callable[[int], None],
        *,
        fused: bool = True,
    ) -> None:
        self._plan, self._stages, self._transport, self._format = plan, stages, transport, message_format
        self._sliced = {k: SlicedStage(stage, fused=fused) for k, stage in stages.items()}
        self._check, self._stage_done = check, stage_done
        self._kept: dict[Plan, Executor] = {}
        self.pool = CachePool()
        self.current = self.get(plan)

    def make(self, plan: Plan, pool: CachePool | None = None) -> Executor:
        """A new executor, which nobody keeps.

        Args:
            plan: what it runs.
            pool: where it takes caches from; by default one of its own.
        """
        self._check(plan)
        return self._executor(plan, CachePool() if pool is None else pool, self._transport, self._format)

    def _executor(self, plan: Plan, pool: CachePool, transport: Transport, message_format: MessageFormat) -> Executor:
        losses = next(iter(self._stages.values())).auxiliary_losses
        auxiliary = AuxiliaryLosses(losses, plan, transport.device, lambda sums: transport.all_reduce(sums, DP))
        return Executor(self._sliced, plan, pool, transport, message_format, auxiliary, self._stage_done)

    def run_alone(self, batch: Batch, loss_head: LossHead) -> None:
        """Performs this rank's actions without the other ranks. Nothing of it is kept, and nothing learned from it.

        Args:
            batch: made-up numbers.
            loss_head: what to compute at the end.
        """
        alone = NullTransport(self._transport.device, self._transport.rank, self._transport.size)
        pool = CachePool()
        self._executor(batch.plan, pool, alone, NullFormat(self._format.parameters)).run(batch, loss_head, train=True)
        pool.keep_only(())  # now, not when the executor is collected

    def get(self, plan: Plan) -> Executor:
        """The executor of a plan, from now on kept, with caches of the common pool. Only the last few are kept; one for
        another plan of the same shape is made quickly: see ``ActionLists``.

        Args:
            plan: what it runs.
        """
        executor = self._kept.pop(plan, None) or self.make(plan, self.pool)
        self._kept[plan] = executor
        while len(self._kept) > PLANS:
            self._kept.pop(next(iter(self._kept)))
        return executor

    def for_tokens(self, plan: Plan, *, train: bool, keep: bool) -> Executor:
        """For values of tokens.

        Args:
            plan: that of the batch.
            train: whether backwards follow. Without them, an executor whose own backwards are still to come is left
                alone, and another made.
            keep: whether it is kept for another batch of this shape. That of the pipeline's own plan always is.
        """
        executor = self.get(plan) if keep or plan == self._plan else None
        return self.make(plan) if executor is None or (executor.is_pending and not train) else executor

    def begin(self, plan: Plan) -> Executor:
        """The executor for a step. Only keys and values of this shape of batch stay in memory; on CPUs, where fresh
        memory is slow to touch, those of the pipeline's own shape too.

        Args:
            plan: that of the batch.
        """
        self.current = self.get(plan)
        shapes = (plan, self._plan) if self._transport.device.type == "cpu" else (plan,)
        self.pool.keep_only({(size, own.seq_len) for own in shapes for size in own.sizes})
        return self.current

    @contextmanager
    def once(self, executor: Executor) -> Iterator[None]:
        """Inside, an executor is the current one, which tells where this rank stands if something fails. Afterwards the
        current one is that of the last step again.

        Args:
            executor: for work that is no step.
        """
        before, self.current = self.current, executor
        try:
            yield
        finally:
            self.current = before

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters."""
        return self._format.parameters

    @property
    def wide(self) -> torch.dtype:
        """The dtype of losses and logits."""
        return self._format.wide

    @property
    def kept(self) -> tuple[Executor, ...]:
        """Those of the last few plans."""
        return tuple(self._kept.values())
