"""What a run is made of: a `RunContext` that stays, and a `RunState` that every step changes.

::

    RunContext   one for the whole run      config, world, data, objective, identity
    RunState     one for each plan          pipe, optimizer, random states     | tensors of a checkpoint
                                            step, position, skipped, best      | notes of a checkpoint

The line between the two is the checkpoint: all that must survive a kill is in the state, and nothing else is. When a
run measures and plans again, it saves its state, builds another one for the new plan, and loads what it saved: a
checkpoint does not depend on the layout.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from terapipe.planning.documents import DocumentPlanner
from terapipe.runtime import Pipeline, Transport, device_mesh, rng_state, seed_rng, set_rng_state
from terapipe.search.result import PlanResult
from terapipe.training.config import RunConfig
from terapipe.training.data.token_file import Data
from terapipe.training.identity import NOTE, Identity, same_evaluation, same_rows
from terapipe.training.model import RunModel
from terapipe.training.objective import RunObjective
from terapipe.training.optimizer import make_optimizer


@dataclass(frozen=True)
class RunContext:
    """What stays the same as long as a run lives, on this rank.

    Args:
        config: All of run.toml.
        world: Connects all ranks, before there is a pipeline and after it has failed.
        data: The token files and the tokenizer.
        objective: The loss, and what it needs beside tokens.
        identity: What is trained, on what, with which settings. Every checkpoint carries it.
    """

    config: RunConfig
    world: Transport
    data: Data
    objective: RunObjective
    identity: Identity


@dataclass
class RunState:
    """What a step changes and a checkpoint saves, on this rank.

    Args:
        run_plan: The plan and its layout, with the prediction that was made for it.
        planner: Cuts each batch by its own documents; None cuts all batches alike, as the plan says.
        pipe: The stages of this rank.
        optimizer: For the parameters of this rank.
        random: The tensors that random states are saved from and loaded into. They are allocated once, because a
            checkpoint is loaded in place.
        step: Optimizer steps done. A skipped step counts: the data went on.
        position: Sequences taken since the start of training, over all replicas and epochs. With the seed it says
            which batch is next, so no reader has state of its own.
        skipped: How many of the latest steps, in a row, were not finite.
        best: The lowest evaluation loss so far; infinite before the first.
        eval_loss: The evaluation loss at this step; None if it was not evaluated.
    """

    run_plan: PlanResult
    planner: DocumentPlanner | None
    pipe: Pipeline
    optimizer: Optimizer
    random: dict[str, Tensor]
    step: int = 0
    position: int = 0
    skipped: int = 0
    best: float = math.inf
    eval_loss: float | None = None

    @classmethod
    def build(
        cls, context: RunContext, model: RunModel, run_plan: PlanResult, planner: DocumentPlanner | None
    ) -> "RunState":
        """Builds pipeline and optimizer as they are before the first step. All ranks call it together.

        Args:
            context: The run.
            model: On the meta device; the pipeline materializes this rank's stages of it, so it serves once.
            run_plan: What to build for.
            planner: As above.
        """
        config, layout, world = context.config, run_plan.layout, context.world
        context.objective.check(run_plan.plan)
        several = layout.dp * layout.tp > 1
        transport = world.over(device_mesh(layout, timeout=config.failures.timeout)) if several else world
        loss_fn = context.objective.loss_fn
        pipe = Pipeline(model.model, run_plan.plan, loss_fn=loss_fn, shard=layout.shard, transport=transport)
        start = config.checkpoints.start
        context.objective.prepare(pipe, context.data, lambda: pipe.load(start) if start else None)
        if config.model.compile:
            _compile(pipe)
        optimizer = make_optimizer(pipe.named_parameters(), config.optimizer)
        return cls(run_plan, planner, pipe, optimizer, seed_rng(config.data.seed, world.global_rank))

    @property
    def _rank(self) -> int:
        return self.pipe.transport.global_rank

    def take_notes(self, identity: Identity) -> dict[str, Any]:
        """Returns what a checkpoint says beside its tensors, as JSON, and copies the random states to `random`.

        Numbers that are not finite become None, because JSON has neither NaN nor infinity.

        Args:
            identity: Of the run.
        """
        for name, state in rng_state(self._rank).items():
            self.random[name].copy_(state)
        return {
            "step": self.step,
            "position": self.position,
            "skipped": self.skipped,
            "best": self.best if math.isfinite(self.best) else None,
            "eval_loss": self.eval_loss if math.isfinite(self.eval_loss or 0.0) else None,
            "layout": str(self.run_plan.layout),
            NOTE: identity,
        }

    def resume(self, notes: Mapping[str, Any], context: RunContext) -> None:
        """Continues where a checkpoint was saved. Its tensors have been loaded; this takes over its notes.

        Args:
            notes: What `take_notes` returned then, perhaps in another run and on another layout.
            context: The run as it is now.
        """
        self.step, self.position, self.skipped = notes["step"], notes["position"], notes["skipped"]
        if not same_rows(notes, context.identity):  # of another run, with another kind of data
            self.position = 0
        comparable = notes["best"] is not None and same_evaluation(notes, context.identity)
        self.best = notes["best"] if comparable else math.inf
        if notes["layout"] == str(self.run_plan.layout):
            set_rng_state(self.random, self._rank)
        else:  # states of other ranks, which computed other layers: draw new ones, and not those of step 0 again
            seed_rng(context.config.data.seed + self.step, self._rank)


def _compile(pipe: Pipeline) -> None:
    """Compiles the layers of all stages now, on all ranks at the same time; in a step they would wait for each other,
    one stage after the next."""
    from terapipe.modeling.compiling import compile_layers

    for stage in pipe.stages.values():
        compile_layers(stage)
    pipe.warm_up()
