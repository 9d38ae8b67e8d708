"""The loop: batches, steps, evaluations, checkpoints, until all steps are done or somebody asks to stop."""

import math
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from terapipe import files
from terapipe.config import RunConfig
from terapipe.runtime.pipeline import Pipeline
from terapipe.runtime.transport import ALL
from terapipe.training.checkpoints import Checkpoints, folder_of
from terapipe.training.data.loader import Feed
from terapipe.training.data.token_file import Data
from terapipe.training.drift import Drift
from terapipe.training.evaluator import Evaluator
from terapipe.training.identity import NOTE, Identity, same_evaluation
from terapipe.training.learning_rate import learning_rate
from terapipe.training.logging.journal import Journal
from terapipe.training.optimizer import set_lr
from terapipe.training.planned import Planned
from terapipe.training.randomness import restore, seeded, states
from terapipe.training.stopping import Stop


class Outcome(Enum):
    FINISHED = "finished"
    STOPPED = "stopped"
    REPLAN = "replan"


class NotFiniteError(ArithmeticError):
    """Loss or gradients that nothing can be learned from."""


class Step(NamedTuple):
    loss: float
    norm: float
    lr: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Trainer:
    """One rank's part in it. All ranks do the same things in the same order."""

    def __init__(
        self,
        config: RunConfig,
        pipe: Pipeline,
        optimizer: Optimizer,
        data: Data,
        planned: Planned,
        journal: Journal,
        random: dict[str, Tensor],
        identity: Identity,
    ) -> None:
        """``random`` are the states of the generators, to be saved and gone on from; ``identity`` is saved, too."""
        self._config, self._pipe, self._optimizer = config, pipe, optimizer
        self._planned, self._journal, self._random, self._identity = planned, journal, random, identity
        self._predicted = planned.step_time(config.optimizer.accumulate)
        self._feed = Feed(data.train, config.data, pipe, shuffle=config.data.shuffle)
        self._evaluator = Evaluator(config, pipe, data, journal)
        self._checkpoints = Checkpoints(folder_of(config), config.checkpoints, journal.is_main, self.say)
        self.step = self._begun = self._position = self._skipped = 0
        self._best = math.inf
        self._eval_loss: float | None = None
        self._drift = Drift(self._predicted, config.plan)

    @property
    def _rank(self) -> int:
        return self._pipe.transport.global_rank

    # From start to end

    def run(self, stop: Stop) -> Outcome:
        try:
            return self._run(stop)
        except Exception as error:
            self.say("failed", str(error))
            raise

    def _run(self, stop: Stop) -> Outcome:
        steps, every = self._config.optimizer.steps, self._config.checkpoints.every
        self._pipe.train()
        while self.step < steps:
            began = time.perf_counter()
            self._one_step(began)
            due = bool(every) and self.step % every == 0
            improved = self._evaluate_if_due()
            self._checkpoints.poll()
            if self._any(bool(stop.asked)):
                self.say("stopped", f"asked to stop{f' by {stop.asked}' if stop.asked else ''}; saving")
                return self._end(Outcome.STOPPED)
            if self.step < steps and (due or (improved and self._config.checkpoints.best)):
                replan = due and self._drift.seen and self._config.plan.replan
                if self._save(wait=replan) and replan:
                    return Outcome.REPLAN
        return self._end(Outcome.FINISHED)

    def _end(self, outcome: Outcome) -> Outcome:
        self._checkpoints.finish()
        if self.step > self._begun and not self._save(wait=True):
            raise OSError(
                f"the run is at step {self.step}, which could not be saved in {self._checkpoints.folder}; make room "
                "and start it again"
            )
        return outcome

    def _any(self, mine: bool) -> bool:
        flag = torch.tensor(int(mine), device=self._pipe.device)
        return bool(self._pipe.transport.all_reduce(flag, ALL))

    # One step

    def _one_step(self, began: float) -> None:
        made = self._learn()
        self._skipped = 0 if made.finite else self._skipped + 1
        self.step += 1
        seconds = time.perf_counter() - began
        tokens = self._config.data.batch_size * self._config.data.seq_len * self._config.optimizer.accumulate
        row: dict[str, Any] = {
            "step": self.step,
            "loss": made.loss,
            "lr": made.lr,
            "grad_norm": made.norm,
            "seconds": seconds,
            "tokens": self._position * self._config.data.seq_len,
            "tokens_per_second": tokens / seconds,
        }
        if not made.finite:
            row["skipped"] = True
        if self._predicted is not None:
            row["predicted"] = self._predicted
        if self.step % self._config.logging.every == 0:
            row |= self._looks()
        self._journal.row(row)
        if not made.finite:
            self._refuse(made)
        self._watch(seconds)

    def _learn(self) -> Step:
        """Gradients of all batches of the step, every label weighing the same; clipped, applied if they are finite."""
        wanted, feed = self._config.optimizer, self._feed
        batches = [feed.at(self._position + i * self._config.data.batch_size) for i in range(wanted.accumulate)]
        total = feed.count(batches)
        losses = [self._pipe.step(*given, total=total).double() for given in batches]
        self._position += wanted.accumulate * self._config.data.batch_size
        norm = self._pipe.clip_grad_norm_(wanted.max_grad_norm) if wanted.max_grad_norm else self._pipe.grad_norm()
        lr = learning_rate(self.step, self._config.lr, wanted)
        made = Step(float(sum(losses)), float(norm), lr)
        if made.finite:
            set_lr(self._optimizer, lr)
            self._optimizer.step()
        layout = self._planned.layout
        # Replicas without shards make every gradient anew and add what was there before, so nothing is left there.
        self._pipe.zero_grad(set_to_none=layout.dp > 1 and not layout.shard)
        return made

    def _refuse(self, made: Step) -> None:
        """Never trains on what is not a number; the same on all ranks, which all have these numbers."""
        what = f"loss {made.loss} and gradient norm {made.norm} at step {self.step}"
        limit = self._config.failures.max_skipped
        if self._config.failures.on_nan == "stop" or self._skipped >= limit:
            many = f", {self._skipped} steps in a row" if self._skipped > 1 else ""
            stops = self._config.failures.on_nan == "stop"
            other = (
                "leave such steps out with failures.on_nan = 'skip'"
                if stops
                else f"raise failures.max_skipped from {limit}"
            )
            raise NotFiniteError(
                f"{what} are not finite{many}; nothing was learned from it. Go on from the last checkpoint with a "
                f"smaller optimizer.lr, or {other}"
            )
        self.say("nan", f"{what} are not finite; the step is left out")

    # Looking

    def _looks(self) -> dict[str, Any]:
        timeline = self._pipe.timeline_on_first()
        memory = self._pipe.transport.collect(_peak_memory(self._pipe.device), ALL)
        if not self._journal.is_main or timeline is None:
            return {}
        with suppress(OSError):  # the disk is full: metrics say so
            files.write(self._config.folder / "timeline.json", timeline.to_json())
        return {"idle": timeline.idle, "memory": memory}

    def _watch(self, seconds: float) -> None:
        """Only the first rank's clock counts."""
        if self._drift.due(seconds):
            said = self._drift.judge(self._pipe.transport.gather(self._drift.ratio, ALL)[0])
            if said:
                self.say("drift", said)

    def say(self, event: str, message: str, step: int | None = None) -> None:
        self._journal.row({"step": self.step if step is None else step, "event": event, "message": message})

    def _evaluate_if_due(self) -> bool:
        """Whether the loss is the lowest so far."""
        every = self._config.evaluation.every
        self._eval_loss = self._evaluator.run(self.step) if every and self.step % every == 0 else None
        if self._eval_loss is None or not self._eval_loss < self._best:  # NaN is lower than nothing
            return False
        self._best = self._eval_loss
        return True

    # Saving and going on

    def _save(self, *, wait: bool) -> bool:
        notes = {
            "step": self.step,
            "position": self._position,
            "skipped": self._skipped,
            "best": self._best if math.isfinite(self._best) else None,
            "eval_loss": self._eval_loss if math.isfinite(self._eval_loss or 0.0) else None,
            "layout": str(self._planned.layout),
            NOTE: self._identity,
        }
        for name, state in states(self._rank).items():
            self._random[name].copy_(state)
        return self._checkpoints.save(self._pipe, self._optimizer, self._random, notes, wait)

    def resume(self, notes: Mapping[str, Any]) -> None:
        """After a checkpoint has been loaded into parameters, optimizer and ``random``."""
        self.step = self._begun = notes["step"]
        self._position, self._skipped = notes["position"], notes["skipped"]
        comparable = notes["best"] is not None and same_evaluation(notes, self._identity)
        self._best = notes["best"] if comparable else math.inf
        if notes["layout"] == str(self._planned.layout):
            restore(self._random, self._rank)
        else:  # other ranks, other parts: what they would have drawn is nobody's
            seeded(self._config.data.seed + self.step, self._rank)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
