"""The executors of a rank, one for each plan, and the caches that they share."""

from collections.abc import Callable, Mapping

import torch

from terapipe.modeling.offload import Copier
from terapipe.modeling.stage import SlicedStage, Stage
from terapipe.planning.slices import Plan
from terapipe.runtime.auxiliary import AuxiliaryLosses
from terapipe.runtime.comm.channel import MessageFormat, NullFormat
from terapipe.runtime.comm.mesh import DP
from terapipe.runtime.comm.transport import NullTransport, Transport
from terapipe.runtime.executor import CachePool, Executor
from terapipe.runtime.loss_head import Batch, LossHead

PLANS = 8  # of which executors are kept


class Executors:
    """Makes an executor for each plan, and keeps those of the last few plans.

    Args:
        plan: the pipeline's own.
        stages: those of this rank, by number.
        transport: to the other ranks.
        dtype: that of the parameters; without autocast that of messages, too (see ``MessageFormat``).
        check: refuses plans that the model cannot follow.
        stage_done: is told when a stage's gradients are complete.
        fused: see ``SlicedStage``.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        transport: Transport,
        dtype: torch.dtype,
        check: Callable[[Plan], None],
        stage_done: Callable[[int], None],
        *,
        fused: bool = True,
    ) -> None:
        self._plan, self._stages, self._transport = plan, stages, transport
        self.message_format = MessageFormat(dtype)
        self.dtype, self.wide = dtype, self.message_format.wide  # of parameters; of losses and logits
        self._sliced = {k: SlicedStage(stage, fused=fused) for k, stage in stages.items()}
        self._check, self._stage_done = check, stage_done
        self._recent: dict[Plan, Executor] = {}
        self.pool, self.copier = CachePool(), Copier(transport.device)
        self.current = self.get(plan)

    def make(self, plan: Plan, pool: CachePool | None = None) -> Executor:
        """A new executor, which nobody keeps.

        Args:
            plan: what it runs.
            pool: where it takes caches from; by default one of its own.
        """
        self._check(plan)
        for sliced in self._sliced.values():
            sliced.check_modes(plan.recompute_modes)
        return self._executor(plan, CachePool() if pool is None else pool, self._transport, self.message_format)

    def _executor(self, plan: Plan, pool: CachePool, transport: Transport, message_format: MessageFormat) -> Executor:
        losses = next(iter(self._stages.values())).auxiliary_losses
        auxiliary = AuxiliaryLosses(losses, plan, transport.device, lambda sums: transport.all_reduce(sums, DP))
        return Executor(self._sliced, plan, pool, transport, message_format, auxiliary, self.copier, self._stage_done)

    def run_alone(self, batch: Batch, loss_head: LossHead) -> None:
        """Performs this rank's actions without the other ranks. Nothing of it is kept, and nothing learned from it.

        Args:
            batch: made-up numbers.
            loss_head: what to compute at the end.
        """
        alone = NullTransport(self._transport.device, self._transport.rank, self._transport.size)
        pool, null = CachePool(), NullFormat(self.dtype)
        self._executor(batch.plan, pool, alone, null).run(batch, loss_head, train=True)
        pool.keep_only(())  # now, not when the executor is collected

    def get(self, plan: Plan) -> Executor:
        """The executor of a plan, from now on kept, with caches of the common pool. Only the last few are kept; one for
        another plan of the same shape is made quickly: see ``ActionLists``.

        Args:
            plan: what it runs.
        """
        executor = self._recent.pop(plan, None) or self.make(plan, self.pool)
        self._recent[plan] = executor
        while len(self._recent) > PLANS:
            self._recent.pop(next(iter(self._recent)))
        return executor

    def for_tokens(self, plan: Plan, *, train: bool, keep: bool) -> Executor:
        """Returns an executor that computes values of tokens.

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

    @property
    def recent(self) -> tuple[Executor, ...]:
        """The executors of the last few plans, oldest first."""
        return tuple(self._recent.values())
