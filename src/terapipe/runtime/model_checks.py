"""What a model says of the plans that it is exact with, asked when a pipeline is made and for every new plan."""

from terapipe.modeling.stage import PipelineModel, Stage, TensorParallel
from terapipe.modeling.verification import check_stage
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.mesh import TP
from terapipe.runtime.comm.transport import Transport


class ModelChecks:
    """What a model may say of the plans and batches that it is exact with; see PipelineModel.

    Args:
        model: the whole model.
    """

    def __init__(self, model: PipelineModel) -> None:
        self._model = model
        self.is_verified = model.is_verified  # before stages change the model's modules
        self._refused_modes: dict[Recompute, str] = {}  # of recomputation, and why
        self._whole_only = False  # whether slices were never checked

    def size(self, plan: Plan, ranks: int) -> None:
        """Refuses a plan of another number of layers or ranks.

        Args:
            plan: the same on all ranks, so that all refuse it alike.
            ranks: those of the pipeline.
        """
        if plan.num_layers != self._model.num_layers:
            raise ValueError(
                f"the plan splits {plan.num_layers} layers, the model has {self._model.num_layers}; "
                "the last of the plan's boundaries must be the number of layers"
            )
        if ranks != plan.num_ranks:
            raise ValueError(
                f"the plan is for {plan.num_ranks} ranks ({plan.num_stages} stages, {plan.chunks} per rank), got "
                f"{ranks} processes; start {plan.num_ranks} (torchrun --nproc-per-node {plan.num_ranks}) or make "
                "another plan"
            )

    def make_stages(self, plan: Plan, transport: Transport, *, own_loss: bool) -> tuple[dict[int, Stage], int]:
        """Makes the stages of this rank, and checks them. Where operators are split, the check runs on whole stages
        before.

        Args:
            plan: which layers they have.
            transport: tells which stages are this rank's, and by how many devices each operator is shared.
            own_loss: whether the last stage's own loss is used.

        Returns:
            The stages by number, and the number that slice lengths must be multiples of.
        """
        parts, device = transport.tp_size, transport.device
        tp: TensorParallel | None = None
        tile = 1
        if parts > 1:
            even = all(length % parts == 0 for lengths in plan.lengths for length in lengths)
            tp = TensorParallel(transport.ranks.submesh(TP), sequence_parallel=even)
            tile = parts if even else 1
        stages = {}
        for k in plan.stages_of(transport.rank):
            if tp and not self.is_verified:
                self.stage(self._model.make_stage(plan, k, device), k, plan, own_loss=own_loss)
            stages[k] = self._model.make_stage(plan, k, device, tp)
            if not tp:
                self.stage(stages[k], k, plan, own_loss=own_loss)
        return stages, tile

    def stage(self, stage: Stage, k: int, plan: Plan, *, own_loss: bool) -> None:
        """Runs a few made-up tokens through a stage of a model that nobody has verified yet. Raises ValueError if it
        would train wrongly.

        Args:
            stage: whole, not split over devices.
            k: its number.
            plan: whose slice lengths are tried.
            own_loss: whether the last stage's own loss is used.
        """
        if self.is_verified:
            return
        self._whole_only = all(len(row) == 1 for row in plan.lengths)
        first, last = k == 0, k == plan.num_stages - 1
        self._refused_modes |= check_stage(
            self._model, stage, first=first, last=last, own_loss=own_loss, plan_lengths=plan.lengths
        )

    def plan(self, plan: Plan) -> None:
        """Refuses slices and modes of recomputation that the model is not exact with.

        Args:
            plan: of a pipeline or of one batch.
        """
        for mode, reason in self._refused_modes.items():
            if mode in plan.recompute_modes:
                raise ValueError(f"this model cannot be trained with recompute={mode!r}: {reason}; take another mode")
        if self._whole_only and any(len(row) > 1 for row in plan.lengths):
            raise ValueError(
                "slices of this model were not checked, because the pipeline's own plan cuts no sequence; make the "
                "Pipeline with a plan that has slices"
            )
        self._model.check_plan(plan)
