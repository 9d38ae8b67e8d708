"""The executors of a pipeline: one for each plan. Those of the last few are kept, and share their buffers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from terapipe.modeling.sliced_stage import SlicedStage
from terapipe.modeling.stage import Stage
from terapipe.planning.slices import Plan
from terapipe.runtime.auxiliary import AuxiliaryLosses
from terapipe.runtime.comm.mesh import DP
from terapipe.runtime.comm.transport import NullTransport, Transport
from terapipe.runtime.executor import Executor
from terapipe.runtime.inputs import Batch
from terapipe.runtime.loss_head import LossHead
from terapipe.runtime.messages import Wire
from terapipe.runtime.silence import SilentWire
from terapipe.runtime.spare_caches import SpareCaches

PLANS = 8  # of which executors are kept


class Executors:
    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        transport: Transport,
        wire: Wire,
        check: Callable[[Plan], None],
        stage_done: Callable[[int], None],
        *,
        fused: bool = True,
    ) -> None:
        """``check`` refuses plans that the model cannot follow; ``stage_done`` is told when gradients are complete;
        ``fused``: see ``SlicedStage``."""
        self._plan, self._stages, self._transport, self._wire = plan, stages, transport, wire
        self._sliced = {k: SlicedStage(stage, fused=fused) for k, stage in stages.items()}
        self._check, self._stage_done = check, stage_done
        self._kept: dict[Plan, Executor] = {}
        self.spare = SpareCaches()
        self.current = self.get(plan)

    def make(self, plan: Plan, spare: SpareCaches | None = None) -> Executor:
        """With buffers of its own, unless some are given."""
        self._check(plan)
        return self._executor(plan, SpareCaches() if spare is None else spare, self._transport, self._wire)

    def _executor(self, plan: Plan, spare: SpareCaches, transport: Transport, wire: Wire) -> Executor:
        losses = next(iter(self._stages.values())).auxiliary_losses
        auxiliary = AuxiliaryLosses(losses, plan, transport.device, lambda sums: transport.all_reduce(sums, DP))
        return Executor(self._sliced, plan, spare, transport, wire, auxiliary, self._stage_done)

    def run_alone(self, batch: Batch, loss_head: LossHead) -> None:
        """This rank's actions without the other ranks. Nothing of it is kept, and nothing learned from it."""
        alone = NullTransport(self._transport.device, self._transport.rank, self._transport.size)
        spare = SpareCaches()
        wire = SilentWire(self._wire.parameters)
        self._executor(batch.plan, spare, alone, wire).run(batch, loss_head, train=True)
        spare.keep_only(())  # now, not when the executor is collected

    def get(self, plan: Plan) -> Executor:
        """Only the last few are kept. One for another plan of the same shape is made quickly: see ``ActionLists``."""
        executor = self._kept.pop(plan, None) or self.make(plan, self.spare)
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
        """For a step. Only keys and values of this shape of batch stay in memory; on CPUs, where fresh memory is slow
        to touch, those of the pipeline's own shape too."""
        self.current = self.get(plan)
        kept = (plan, self._plan) if self._transport.device.type == "cpu" else (plan,)
        self.spare.keep_only({(size, own.seq_len) for own in kept for size in own.sizes})
        return self.current

    @contextmanager
    def once(self, executor: Executor) -> Iterator[None]:
        """For work whose shape hardly comes again: nothing is kept for it, and nothing else is let go."""
        kept, self.current = self.current, executor
        try:
            yield
        finally:
            self.current = kept

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters."""
        return self._wire.parameters

    @property
    def wide(self) -> torch.dtype:
        """The dtype of losses and logits."""
        return self._wire.wide

    @property
    def kept(self) -> tuple[Executor, ...]:
        return tuple(self._kept.values())
