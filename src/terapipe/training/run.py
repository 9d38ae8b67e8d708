"""A training run on one rank: data, model, plan, pipeline, loop; repeated with a new plan if asked.

::

    run_rank                      every process begins here
      Run.run                     rank 0 locks the folder
        prepare, open_data        texts -> token files (rank 0 writes, all ranks map them)
        make_model                on the meta device
        _first_plan               from a file, from the last start, measured, or equal slices
        +-> _train                pipeline, optimizer, newest whole checkpoint
        |     Trainer.run         the steps
        +---- replan              only with plan.replan: measure, plan, and build all of it anew
        _end                      ended.json, report.html

Rank 0 writes all files but the shards of checkpoints, and each before anything relies on it (README.md shows the
folder). A run that is killed anywhere above goes on, when started again, from the newest whole checkpoint.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from rich.console import Console

from terapipe import files
from terapipe.launch.processes import end_with_parent, record, take_cores
from terapipe.planning.profile import Profile
from terapipe.runtime import FailureReport, PipelineError, Transport, local_device, rank_and_size, restarts
from terapipe.runtime.checkpoint import NOTES, is_whole, read_notes
from terapipe.search.result import PlanResult
from terapipe.training import run_plan as plans
from terapipe.training.checkpoint_folder import check_begin, clean, folder_of, load, newest_whole, path_of, steps
from terapipe.training.config import RunConfig
from terapipe.training.data.prepare import prepare
from terapipe.training.data.token_file import Data, open_data
from terapipe.training.export import check_export, export_gpt
from terapipe.training.identity import compare, flatten, identity
from terapipe.training.lock import Lock
from terapipe.training.logging.display import Display, RunLog, Terminal
from terapipe.training.logging.metrics import Metrics
from terapipe.training.logging.run_report import write_report
from terapipe.training.model import RunModel, dtype_of, make_model
from terapipe.training.objective import RunObjective
from terapipe.training.state import RunContext, RunState
from terapipe.training.trainer import NotFiniteError, Outcome, StopSignal, Trainer

T = TypeVar("T")

ENDED = "ended.json"  # how the run ended: finished or stopped. Missing while it runs and if it failed


def run_rank(config: RunConfig) -> int:
    """Trains on this rank: the entry point of every process of `terapipe train`.

    With several ranks it does not return, but exits (see `_leave`).

    Args:
        config: The same on all ranks.

    Returns:
        The exit code: 0 if the run finished or was stopped, 1 if it failed.
    """
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
    """With several ranks, exits at once: threads may wait for ranks that are gone, and the destructors of gloo's
    process groups occasionally abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    if world is not None and world.size > 1:
        os._exit(code)
    return code


def _report_error(error: Exception, world: Transport | None) -> None:
    """Tells all ranks, and prints the error: without a traceback if the user can act on the message.

    The other ranks stop with this error as their cause, instead of waiting for their timeout. It is also recorded for
    the launcher, whose last line names the rank that failed first.

    Args:
        error: Of this rank; a PipelineError is one that it was told of.
        world: None if the ranks have not met.
    """
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
    """One rank of a training run, from the files of its configuration to its report.

    All ranks make one and call `run`. What only one process may do (prepare data, search a plan, remove files) is done
    on rank 0 by `_on_first`, and the others wait where they notice if rank 0 dies.

    Args:
        config: The same on all ranks.
        world: Connects all ranks before there is a pipeline.
        stop: Set by SIGINT and SIGTERM.
    """

    def __init__(self, config: RunConfig, world: Transport, stop: StopSignal) -> None:
        self._config, self._world, self._stop = config, world, stop
        self._is_main = world.global_rank == 0
        self._console = Console(quiet=not self._is_main, highlight=False)
        self._profile: Profile | None = None
        self._checkpoints = folder_of(config)

    def run(self) -> None:
        """Trains until all steps are done or a stop is requested.

        Raises:
            ValueError: The configuration, data, a plan or a checkpoint cannot be used; nothing was trained.
            NotFiniteError: Loss or gradients are NaN, and failures.on_nan says stop.
            PipelineError: Another rank failed.
            OSError: The last step could not be saved.
        """
        with Lock(self._config.folder) if self._is_main else nullcontext():
            self._run()

    def _run(self) -> None:
        """Refuses what it can before it measures: measuring takes plan.seconds, and tokenizing may take an hour."""
        self._begin()
        data = self._data()
        model = self._model(data)
        check_export(self._config, model.shape)
        objective = RunObjective(self._config, model)
        context = RunContext(self._config, self._world, data, objective, identity(self._config, data, model))
        self._on_first(lambda: self._check_same(context))
        run_plan = self._first_plan(model)
        while self._train(context, model, run_plan) is Outcome.REPLAN:
            model = self._model(data)
            run_plan = self._from_measurements(model)

    def _begin(self) -> None:
        """Removes how the last start ended, so that a kill is not taken for an end, and what a crash left behind."""
        if self._is_main:
            (self._config.folder / ENDED).unlink(missing_ok=True)
            files.write(self._config.folder / "config.toml", self._config.to_toml())
        self._on_first(self._check_begin)

    def _check_begin(self) -> None:
        """Called on rank 0, before anything looks at the checkpoints."""
        clean(self._checkpoints)
        if not restarts():  # a restart finds the checkpoints of the start before
            check_begin(self._config)

    def _data(self) -> Data:
        """Tokenizes the texts on rank 0, unless that is done, and opens the token files on all ranks."""
        config, objective = self._config.data, self._config.objective
        folder = Path(config.cache) if config.cache else self._config.folder / "data"
        say = partial(self._console.print, soft_wrap=True)
        self._on_first(lambda: prepare(config, folder, say=say, objective=objective))
        return open_data(config, folder)

    def _model(self, data: Data) -> RunModel:
        """A new one each time: a pipeline takes the modules of the model apart."""
        return make_model(self._config.model, self._config.data, data.tokenizer.vocab, self._config.objective)

    def _check_same(self, context: RunContext) -> None:
        """Refuses a checkpoint of another model before measuring. A damaged one is handled when it is loaded."""
        saved = steps(self._checkpoints)
        checkpoint = path_of(self._checkpoints, saved[-1]) if saved else self._config.checkpoints.start
        if checkpoint is not None and is_whole(checkpoint, NOTES):
            compare(read_notes(checkpoint), context.identity, checkpoint, own=self._is_own(checkpoint))

    def _is_own(self, checkpoint: Path) -> bool:
        """Whether a checkpoint lies in this run's folder."""
        return checkpoint.parent.resolve() == self._checkpoints.resolve()

    def _on_first(self, function: Callable[[], T]) -> T:
        """Calls it on rank 0, in a thread, and returns its result on all ranks. They notice failures of each other
        meanwhile: tokenizing takes longer than any timeout of a collective."""
        with ThreadPoolExecutor(1) as thread:
            result = self._world.await_one(thread.submit(function) if self._is_main else None)
        return cast(T, self._world.gather(result)[0])

    # The plan

    def _first_plan(self, model: RunModel) -> PlanResult:
        """The plan of plan.file; else the one that this run had before; else the fastest by a profile, which is read
        or measured; else equal slices."""
        config, ranks = self._config, self._world.size
        result = self._on_first(lambda: plans.from_file(config, ranks) or plans.resume(config, ranks))
        if result is None and config.plan.profile:
            return self._from_profile(model, Profile.load(config.plan.profile))
        if result is None and model.shape is not None and config.plan.seconds:
            return self._from_measurements(model)
        return self._save_plan(result or plans.equal_slices(config, model, ranks))

    def _from_measurements(self, model: RunModel) -> PlanResult:
        """Measures the model as it is and saves profile.json, which a later `terapipe plan` can use as well."""
        message = f"measuring the model for about {self._config.plan.seconds:g} s"
        with self._console.status(message) if self._console.is_terminal else nullcontext():
            profile = plans.measure(self._config, model, self._world)
        if self._is_main:
            files.write(self._config.folder / "profile.json", profile.to_json() + "\n")
        return self._from_profile(model, profile)

    def _from_profile(self, model: RunModel, profile: Profile) -> PlanResult:
        """Searches on rank 0 and sends the result to all: they must run the very same plan."""
        self._profile = profile
        return self._save_plan(
            self._on_first(lambda: plans.from_profile(self._config, model, profile, self._world.size))
        )

    def _save_plan(self, run_plan: PlanResult) -> PlanResult:
        """Writes plan.json and predicted.json before the first step, so that a restart goes on with the same plan, and
        tells the user what it is."""
        if self._is_main:
            plans.save(self._config, self._world.size, run_plan)
            self._save_prediction(run_plan)
            plan = run_plan.plan
            lengths = ", ".join(map(str, plan.lengths[0]))
            self._console.print(f"{run_plan.layout}; order {plan.order}; slices of {lengths} tokens")
            lr, optimizer = self._config.lr, self._config.optimizer
            if lr.warmup > optimizer.steps:
                warning = f"lr.warmup {lr.warmup} is longer than optimizer.steps {optimizer.steps}"
                self._console.print(f"{warning}: the learning rate stays below optimizer.lr", soft_wrap=True)
        return run_plan

    def _save_prediction(self, run_plan: PlanResult) -> None:
        """A prediction of an earlier plan is removed: the report would show it beside what this one measured."""
        path = self._config.folder / "predicted.json"
        if self._profile is not None and run_plan.source is not None:
            files.write(path, run_plan.simulate().to_json())
        elif not run_plan.predicted:
            path.unlink(missing_ok=True)

    # Training

    def _train(self, context: RunContext, model: RunModel, run_plan: PlanResult) -> Outcome:
        """Trains with one plan: until the end, until asked to stop, or until it is time for another plan.

        Args:
            context: The run.
            model: Used up by the pipeline.
            run_plan: What to build for.

        Returns:
            How it ended. In each case a checkpoint of the last step is on the disk.
        """
        planner, planning = plans.document_planner(self._config, model, run_plan)
        state = RunState.build(context, model, run_plan, planner)
        checkpoint, messages = self._resume(context, state)
        with self._run_log(state.step) as log:
            trainer = Trainer(context, state, log)
            for event, message in [*messages, *([("plan", planning)] if planning else [])]:
                trainer.say(event, message)
            outcome = trainer.run(self._stop)
            if outcome is Outcome.FINISHED and self._config.checkpoints.export:
                # A run that had all its steps when it started has saved nothing since.
                saved = path_of(self._checkpoints, state.step) if trainer.has_trained else checkpoint
                trainer.say("export", f"writing a Hugging Face model to {self._config.checkpoints.export}")
                self._export(context, state, model, saved or path_of(self._checkpoints, state.step))
                trainer.say("export", f"wrote model and tokenizer to {self._config.checkpoints.export}")
        if self._is_main:
            self._end(outcome, state.step)
        with suppress(PipelineError):  # everything is saved: a rank that has left early does no harm
            self._world.gather(None)
        return outcome

    def _resume(self, context: RunContext, state: RunState) -> tuple[Path | None, list[tuple[str, str]]]:
        """Loads the run's own newest whole checkpoint, else the one that the configuration names.

        Returns:
            The checkpoint, None at the start of training; and what to tell of it, as events and messages.
        """
        config = self._config.checkpoints
        newest, damaged = newest_whole(self._checkpoints, self._world, config.verify)
        checkpoint = newest or config.start
        if checkpoint is None:
            return None, []
        # newest_whole has verified the run's own files; those of another run nobody has read yet.
        notes = load(checkpoint, state, verify=config.verify and newest is None)
        changes = compare(notes, context.identity, checkpoint, own=self._is_own(checkpoint))
        state.resume(notes, context)
        messages = [*(("damaged", problem) for problem in damaged), ("resumed", f"went on from {checkpoint}")]
        return checkpoint, messages + ([("changed", "; ".join(changes))] if changes else [])

    @contextmanager
    def _run_log(self, step: int) -> Iterator[RunLog]:
        """Opens display and metrics on rank 0; other ranks drop their rows.

        Args:
            step: Where training starts: rows of later steps, left by a start that was killed, are removed.
        """
        config = self._config
        if not self._is_main:
            yield RunLog()
            return
        model = config.model.preset or config.model.config or config.model.folder or config.model.factory
        title = f"{config.folder.name}: {model}"
        with Display(self._console, config.optimizer.steps, step, config.logging.every, title) as display:
            settings = flatten(config)
            metrics = Metrics(config.folder, config.logging, step=step, settings=settings, complain=display.say)
            try:
                yield RunLog(display, metrics)
            finally:
                metrics.close()

    def _export(self, context: RunContext, state: RunState, model: RunModel, checkpoint: Path) -> None:
        """Writes the model in the format of Hugging Face.

        Our GPT is converted from the checkpoint, by rank 0 alone; a Hugging Face model is gathered from all ranks.
        """
        folder, tokenizer = Path(self._config.checkpoints.export), context.data.tokenizer
        if self._config.model.preset and model.shape is not None:
            dtype = dtype_of(self._config.model)
            self._on_first(partial(export_gpt, checkpoint, model.shape, dtype, tokenizer.end, folder, tokenizer.save))
        else:
            from terapipe import hf

            save = hf.save_adapter if self._config.model.lora_rank else hf.save_pretrained
            save(state.pipe, folder, finish=tokenizer.save)

    def _end(self, outcome: Outcome, step: int) -> None:
        """Writes ended.json after the last checkpoint is whole: `terapipe train` takes it for proof of that."""
        if outcome is not Outcome.REPLAN:
            files.write(self._config.folder / ENDED, json.dumps({"how": outcome.value, "step": step}) + "\n")
        self._console.print(f"{outcome.value} at step {step}")
        try:
            self._console.print(f"report: {write_report(self._config.folder)}", soft_wrap=True)
        except OSError as error:
            self._console.print(f"no report: {error}", soft_wrap=True)
