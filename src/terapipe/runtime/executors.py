"""The executors of a pipeline: one for each shape of batch, kept from step to step with their buffers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from terapipe.modeling.auxiliary import auxiliary_losses
from terapipe.modeling.sliced_stage import SlicedStage
from terapipe.modeling.stage import Stage
from terapipe.planning.slices import Plan
from terapipe.runtime.auxiliary import AuxiliaryLosses
from terapipe.runtime.executor import Executor
from terapipe.runtime.inputs import Batch
from terapipe.runtime.last_stage import OutputHead
from terapipe.runtime.mesh import DP
from terapipe.runtime.silence import SilentTransport
from terapipe.runtime.transport import Transport
from terapipe.runtime.wire import Wire
from terapipe.scheduling.actions import Action
from terapipe.scheduling.validation import validated_actions

SHAPES = 8  # of batches, for which buffers are kept


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
        self.current = self.get(plan)

    def make(self, plan: Plan) -> Executor:
        self._check(plan)
        actions = validated_actions(plan, self._transport.rank)
        return self._executor(plan, actions, self._transport)

    def _executor(self, plan: Plan, actions: Sequence[Action], transport: Transport) -> Executor:
        losses = auxiliary_losses(next(iter(self._stages.values())))
        auxiliary = AuxiliaryLosses(losses, plan, transport.device, lambda sums: transport.all_reduce(sums, DP))
        return Executor(self._sliced, plan, actions, transport, self._wire, auxiliary, self._stage_done)

    def run_alone(self, batch: Batch, output_head: OutputHead) -> None:
        """This rank's actions without the other ranks. Nothing of it is kept."""
        silent = SilentTransport(self._transport.device, self._transport.rank)
        actions = validated_actions(batch.plan, silent.rank)
        executor = self._executor(batch.plan, actions, silent)
        executor.run(batch, output_head, train=True)
        executor.release()

    def get(self, plan: Plan) -> Executor:
        """Of shapes other than the pipeline's own only the last few are kept."""
        executor = self._kept.pop(plan, None) or self.make(plan)
        self._kept[plan] = executor
        while len(self._kept) > SHAPES:
            self._kept.pop(next(iter(self._kept)))
        return executor

    def for_forwards(self, plan: Plan) -> Executor:
        """Kept only if it is that of the pipeline's own shape."""
        return self.get(plan) if plan == self._plan else self.make(plan)

    def begin(self, plan: Plan) -> Executor:
        """For a step. Only this shape's keys and values stay in memory; on CPUs, where fresh memory is slow to touch,
        those of the pipeline's own shape too."""
        self.current = self.get(plan)
        on_cpu = self._transport.device.type == "cpu"
        for other in self._kept.values():
            if other is not self.current and not (on_cpu and other.plan == self._plan):
                other.release()
        return self.current

    @contextmanager
    def once(self, executor: Executor) -> Iterator[None]:
        """For work whose shape hardly comes again: nothing is kept for it, and nothing else is let go."""
        kept, self.current = self.current, executor
        yield
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
