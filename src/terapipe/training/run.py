"""A training run on one rank: data, model, plan, pipeline, loop; repeated with a new plan if asked."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer

from terapipe import files
from terapipe.launch.processes import end_with_parent, record, take_cores
from terapipe.planning.profile import Profile
from terapipe.runtime import (
    FailureReport,
    Pipeline,
    PipelineError,
    Transport,
    device_mesh,
    local_device,
    rank_and_size,
    restarts,
    seed_rng,
)
from terapipe.runtime.checkpoint import NOTES, is_whole, read_notes
from terapipe.search.result import PlanResult
from terapipe.training import run_plan as plans
from terapipe.training.checkpoint_folder import check_begin, check_notes, clean, folder_of, newest_whole, path_of, steps
from terapipe.training.config import RunConfig
from terapipe.training.data.prepare import prepare
from terapipe.training.data.token_file import Data, open_data
from terapipe.training.export import check_export, export_gpt
from terapipe.training.identity import Identity, compare, identity
from terapipe.training.lock import Lock
from terapipe.training.logging.display import Display, RunLog, Terminal
from terapipe.training.logging.metrics import Metrics
from terapipe.training.logging.run_report import write_report
from terapipe.training.model import RunModel, dtype_of, make_model
from terapipe.training.objective import RunObjective
from terapipe.training.optimizer import make_optimizer
from terapipe.training.trainer import NotFiniteError, Outcome, StopSignal, Trainer

T = TypeVar("T")

ENDED = "ended.json"  # how the run ended: finished or stopped. Missing while it runs and if it failed


def run_rank(config: RunConfig) -> int:
    """Entry point of every process. Returns the exit code."""
    end_with_parent()
    take_cores()
    world: Transport | None = None
    code = 0
    with Terminal() if rank_and_size()[0] == 0 else nullcontext() as terminal:
        stop = StopSignal(terminal.restore if terminal else lambda: None)
        try:
            world = Transport.join(local_device(), timeout=config.failures.timeout)
            Run(config, world, stop).run()
        except Exception as error:
            _report_error(error, world)
            code = 1
    return _leave(code, world)


def _leave(code: int, world: Transport | None) -> int:
    """With several ranks, exit at once: threads may wait for ranks that are gone, and the destructors of gloo's process
    groups occasionally abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    if world is not None and world.size > 1:
        os._exit(code)
    return code


def _report_error(error: Exception, world: Transport | None) -> None:
    """Tell all ranks, and print the error: without a traceback if the user can act on the message."""
    rank, several = (0, False) if world is None else (world.global_rank, world.size > 1)
    if world is not None and not isinstance(error, PipelineError):
        world.failure.fail(FailureReport(rank, f"{type(error).__name__}: {error}"))
    record(error)
    if isinstance(error, ValueError) and rank:
        return  # rank 0 has the same error, or is told of this one
    expected = isinstance(error, PipelineError | ValueError | OSError | NotFiniteError)
    text = str(error) if expected else "".join(traceback.format_exception(error))
    print(f"terapipe train: {f'rank {rank}: ' if several else ''}{text}", file=sys.stderr)


class Run:
    """``world`` connects all ranks before there is a pipeline."""

    def __init__(self, config: RunConfig, world: Transport, stop: StopSignal) -> None:
        self._config, self._world, self._stop = config, world, stop
        self._is_main = world.global_rank == 0
        self._console = Console(quiet=not self._is_main, highlight=False)
        self._profile: Profile | None = None
        self._checkpoints = folder_of(config)

    def run(self) -> None:
        with Lock(self._config.folder) if self._is_main else nullcontext():
            self._run()

    def _run(self) -> None:
        self._begin()
        self._on_first(self._check_begin)
        data = self._data()
        model = self._model(data)
        check_export(self._config, model.shape)
        self._on_first(lambda: self._check_same(identity(self._config, data, model)))
        objective = RunObjective(self._config, model)  # refuses what it can before measuring
        run_plan = self._first_plan(model)
        while self._train(data, model, objective, run_plan) is Outcome.REPLAN:
            model = self._model(data)
            run_plan = self._from_measurements(model)

    def _model(self, data: Data) -> RunModel:
        return make_model(self._config.model, self._config.data, data.tokenizer.vocab, self._config.objective)

    def _check_same(self, now: Identity) -> None:
        """Refuse a checkpoint of another model before measuring. A damaged one is handled when it is loaded."""
        saved, resume = steps(self._checkpoints), self._config.checkpoints.resume
        checkpoint = path_of(self._checkpoints, saved[-1]) if saved else Path(resume)
        if (saved or resume not in ("auto", "off")) and is_whole(checkpoint, NOTES):
            self._compare(read_notes(checkpoint), now, checkpoint)

    def _compare(self, notes: Mapping[str, Any], now: Identity, checkpoint: Path) -> list[str]:
        own = checkpoint.parent.resolve() == self._checkpoints.resolve()
        return compare(notes, now, checkpoint, own=own)

    def _begin(self) -> None:
        if self._is_main:
            (self._config.folder / ENDED).unlink(missing_ok=True)
            files.write(self._config.folder / "config.toml", self._config.to_toml())

    def _data(self) -> Data:
        config, objective = self._config.data, self._config.objective
        folder = Path(config.cache) if config.cache else self._config.folder / "data"
        say = partial(self._console.print, soft_wrap=True)
        self._on_first(lambda: prepare(config, folder, say=say, objective=objective))
        return open_data(config, folder)

    def _on_first(self, function: Callable[[], T]) -> T:
        """Call it on rank 0 and return its result on all ranks, which notice failures of each other meanwhile."""
        with ThreadPoolExecutor(1) as thread:
            result = self._world.await_one(thread.submit(function) if self._is_main else None)
        return cast(T, self._world.gather(result)[0])

    # The plan

    def _first_plan(self, model: RunModel) -> PlanResult:
        """What was given, or was chosen before, or what measurements say."""
        config, ranks = self._config, self._world.size
        result = self._on_first(lambda: plans.from_file(config, ranks) or plans.resume(config, ranks))
        if result is None and config.plan.profile:
            return self._from_profile(model, Profile.load(config.plan.profile))
        if result is None and model.shape is not None and config.plan.seconds:
            return self._from_measurements(model)
        return self._save_plan(result or plans.equal_slices(config, model, ranks))

    def _from_measurements(self, model: RunModel) -> PlanResult:
        said = f"measuring the model for about {self._config.plan.seconds:g} s"
        with self._console.status(said) if self._console.is_terminal else nullcontext():
            profile = plans.measure(self._config, model, self._world)
        if self._is_main:
            files.write(self._config.folder / "profile.json", profile.to_json() + "\n")
        return self._from_profile(model, profile)

    def _from_profile(self, model: RunModel, profile: Profile) -> PlanResult:
        self._profile = profile
        return self._save_plan(
            self._on_first(lambda: plans.from_profile(self._config, model, profile, self._world.size))
        )

    def _save_plan(self, run_plan: PlanResult) -> PlanResult:
        if self._is_main:
            plans.save(self._config, self._world.size, run_plan)
            self._keep_prediction(run_plan)
            plan = run_plan.plan
            lengths = ", ".join(map(str, plan.lengths[0]))
            self._console.print(f"{run_plan.layout}; order {plan.order}; slices of {lengths} tokens")
            self._doubt_warmup()
        return run_plan

    def _doubt_warmup(self) -> None:
        lr, optimizer = self._config.lr, self._config.optimizer
        if lr.warmup > optimizer.steps:
            told = f"lr.warmup {lr.warmup} is longer than optimizer.steps {optimizer.steps}"
            self._console.print(f"{told}: the learning rate stays below optimizer.lr", soft_wrap=True)

    def _keep_prediction(self, run_plan: PlanResult) -> None:
        path = self._config.folder / "predicted.json"
        if self._profile is not None and run_plan.source is not None:
            files.write(path, run_plan.simulate().to_json())
        elif not run_plan.predicted:
            path.unlink(missing_ok=True)

    # Training

    def _train(self, data: Data, model: RunModel, objective: RunObjective, run_plan: PlanResult) -> Outcome:
        config, layout = self._config, run_plan.layout
        several = layout.dp * layout.tp > 1
        transport = self._world.over(device_mesh(layout, timeout=config.failures.timeout)) if several else self._world
        objective.check(run_plan.plan)
        pipe = Pipeline(model.model, run_plan.plan, loss_fn=objective.loss_fn, shard=layout.shard, transport=transport)
        objective.prepare(pipe, data, self._start_from(pipe))
        if config.model.compile:
            self._compile(pipe)
        optimizer = make_optimizer(pipe.named_parameters(), config.optimizer)
        random = seed_rng(config.data.seed, self._world.global_rank)
        checkpoint, damaged = self._find_checkpoint()
        notes = self._load(checkpoint, pipe, optimizer, random) if checkpoint else {}
        now = identity(config, data, model)
        planner, told = plans.document_planner(config, model, run_plan)
        with self._run_log(notes.get("step", 0)) as log:
            trainer = Trainer(config, pipe, optimizer, data, objective, run_plan, planner, log, random, now)
            if checkpoint:
                changes = self._compare(notes, now, checkpoint)
                trainer.resume(notes)
                self._announce_resume(trainer, checkpoint, damaged, changes)
            if told:
                trainer.say("plan", told)
            outcome = trainer.run(self._stop)
            if outcome is Outcome.FINISHED and config.checkpoints.export:
                trainer.say("export", f"writing a Hugging Face model to {config.checkpoints.export}")
                resumed = checkpoint if checkpoint and trainer.step == notes["step"] else None
                self._export(pipe, data, model, resumed or path_of(self._checkpoints, trainer.step))
                trainer.say("export", f"wrote model and tokenizer to {config.checkpoints.export}")
        if self._is_main:
            self._end(outcome, trainer.step)
        with suppress(PipelineError):  # everything is saved: a rank that has left early does no harm
            self._world.gather(None)
        return outcome

    def _start_from(self, pipe: Pipeline) -> Callable[[], object]:
        """Loads the weights that training began or begins with, where they are those of another run's checkpoint."""
        start = self._config.checkpoints.resume
        return lambda: None if start in ("auto", "off") else pipe.load(Path(start))

    def _load(
        self, checkpoint: Path, pipe: Pipeline, optimizer: Optimizer, random: dict[str, Tensor]
    ) -> Mapping[str, Any]:
        """The notes of the checkpoint. The files of the run's own checkpoints have been verified before."""
        verify = self._config.checkpoints.verify and checkpoint.parent != self._checkpoints
        notes = pipe.load(checkpoint, optimizer, extra=random, verify=verify)
        check_notes(notes, checkpoint)
        return notes

    def _announce_resume(self, trainer: Trainer, checkpoint: Path, damaged: list[str], changes: list[str]) -> None:
        for message in damaged:
            trainer.say("damaged", message)
        trainer.say("resumed", f"went on from {checkpoint}")
        if changes:
            trainer.say("changed", "; ".join(changes))

    def _compile(self, pipe: Pipeline) -> None:
        from terapipe.modeling.compiling import compile_layers

        for stage in pipe.stages.values():
            compile_layers(stage)
        pipe.warm_up()  # compiles on all ranks at the same time; in a step they would wait for each other

    def _find_checkpoint(self) -> tuple[Path | None, list[str]]:
        """The checkpoint to resume from: the run's own newest whole one, or the one that the configuration names. And
        messages about damaged ones."""
        config = self._config.checkpoints
        newest, damaged = newest_whole(self._checkpoints, self._world, config.verify)
        return newest or (None if config.resume in ("auto", "off") else Path(config.resume)), damaged

    def _check_begin(self) -> None:
        clean(self._checkpoints)
        if not restarts():
            check_begin(self._config)

    @contextmanager
    def _run_log(self, step: int) -> Iterator[RunLog]:
        config = self._config
        if not self._is_main:
            yield RunLog()
            return
        model = config.model.preset or config.model.config or config.model.folder or config.model.factory
        title = f"{config.folder.name}: {model}"
        with Display(self._console, config.optimizer.steps, step, config.logging.every, title) as display:
            metrics = Metrics(config.folder, config.logging, step=step, settings=_flat(config), complain=display.say)
            try:
                yield RunLog(display, metrics)
            finally:
                metrics.close()

    def _export(self, pipe: Pipeline, data: Data, model: RunModel, checkpoint: Path) -> None:
        folder, tokenizer = Path(self._config.checkpoints.export), data.tokenizer
        if self._config.model.preset and model.shape is not None:
            dtype = dtype_of(self._config.model)
            self._on_first(partial(export_gpt, checkpoint, model.shape, dtype, tokenizer.end, folder, tokenizer.save))
        else:
            from terapipe import hf

            hf.save_pretrained(pipe, folder, finish=tokenizer.save)

    def _end(self, outcome: Outcome, step: int) -> None:
        if outcome is not Outcome.REPLAN:
            files.write(self._config.folder / ENDED, json.dumps({"how": outcome.value, "step": step}) + "\n")
        self._console.print(f"{outcome.value} at step {step}")
        try:
            self._console.print(f"report: {write_report(self._config.folder)}", soft_wrap=True)
        except OSError as error:
            self._console.print(f"no report: {error}", soft_wrap=True)


def _flat(config: RunConfig) -> dict[str, Any]:
    return {f"{part}.{key}": value for part, keys in asdict(config).items() for key, value in keys.items()}
