"""The objective of a run: its loss function, and what that needs beside tokens.

::

    objective      targets of a step               where they come from
    -------------  ------------------------------  ----------------------------------------------------
    cross_entropy  labels, perhaps weights         the token file
    dpo            labels, log-probs of reference  a pass over all pairs before training, kept in a file
    distill        labels, teacher's hidden        a second pipeline on the same ranks, before each step
    your own       labels                          the token file

The losses themselves are in `terapipe.losses`; this module only feeds them.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from terapipe import files, losses
from terapipe.losses.objective import HiddenLoss, Objective, SequenceLoss, Targets
from terapipe.modeling.stage import PipelineModel
from terapipe.planning.layout import balance
from terapipe.planning.slices import Plan
from terapipe.runtime import ALL, Pipeline
from terapipe.training.config import ObjectiveConfig, RunConfig
from terapipe.training.data.loader import Batch, BatchLoader, Rows
from terapipe.training.data.token_file import Data, TokenFile
from terapipe.training.model import RunModel, check_place, import_object

REFERENCE = "reference-{}.npz"  # log-probabilities by the model as training began


def check_objective(objective: ObjectiveConfig) -> None:
    """Refuses files and folders that are not there.

    Args:
        objective: Names a teacher, or a loss function of one's own.
    """
    if ":" in objective.kind:
        check_place(objective.kind, "objective.kind")
    if objective.kind == "distill" and not Path(objective.teacher).is_dir():
        raise ValueError(f"objective.teacher: there is no folder {objective.teacher}")


class RunObjective:
    """The objective of a run on one rank. Made before the pipeline, which takes its loss function.

    Args:
        config: Of the run.
        model: Its vocabulary and identity; a teacher must match the one, a saved reference the other.
    """

    def __init__(self, config: RunConfig, model: RunModel) -> None:
        self._config, self._objective, self._model = config, config.objective, model
        check_objective(config.objective)
        self._teacher: Pipeline | None = None
        self._reference: dict[Path, NDArray[np.float64]] = {}
        self.loss_fn = self._loss_fn()

    def _loss_fn(self) -> Objective | None:
        """None stands for the pipeline's own cross-entropy, whose targets are labels alone."""
        o = self._objective
        if ":" in o.kind:
            objective = import_object(o.kind, "objective.kind")
            if not callable(objective) and not isinstance(objective, HiddenLoss | SequenceLoss):
                raise ValueError(f"objective.kind: {o.kind} must be a function, a HiddenLoss or a SequenceLoss")
            return objective  # type: ignore[no-any-return]
        if o.kind == "dpo":
            return losses.dpo(beta=o.beta, label_smoothing=o.label_smoothing)
        if o.kind == "distill":
            return losses.distillation(temperature=o.temperature, alpha=o.alpha, head=self._teacher_logits)
        if o.label_smoothing or o.z_loss or o.weights:
            return losses.cross_entropy(label_smoothing=o.label_smoothing, z_loss=o.z_loss)
        return None

    @property
    def rows(self) -> Rows:
        """What a row of a batch is. The loader reads it accordingly."""
        return "pairs" if self._objective.kind == "dpo" else "weighted" if self._objective.weights else "documents"

    @property
    def is_of_sequences(self) -> bool:
        """Whether losses are summed over sequences, not over tokens: then batches must not be filled up."""
        return isinstance(self.loss_fn, SequenceLoss)

    @property
    def has_metrics(self) -> bool:
        """Whether steps have numbers beside their loss."""
        return self.loss_fn is not None or self._model.model.has_auxiliary_losses

    def check(self, plan: Plan) -> None:
        """Refuses a plan that the objective cannot train with.

        Args:
            plan: The two texts of a pair are compared, so they must be in one microbatch.
        """
        if self.rows == "pairs" and any(size % 2 for size in plan.sizes):
            raise ValueError(
                f"the two texts of a pair must be in one microbatch, got microbatches of {plan.sizes} sequences; set "
                "plan.microbatch_size to an even number"
            )

    # What the loss function is given

    def prepare(self, pipe: Pipeline, data: Data, start: Callable[[], object] = lambda: None) -> None:
        """Computes what is needed before the first step. All ranks call it together, before a checkpoint is loaded.

        Args:
            pipe: The pipeline to train, with the weights that the model was made with.
            data: The token files.
            start: Loads the weights that training begins with, where they are others: those of another run's
                checkpoint. The reference of dpo is the model as training begins, not as it is when the run goes on.
        """
        if self._objective.kind == "distill":
            self._teacher = self._make_teacher(pipe)
        if self._objective.kind == "dpo":
            for file in filter(None, (data.train, data.eval)):
                self._reference[file.folder] = self._reference_log_probs(pipe, file, start)

    def targets(self, batch: Batch, file: TokenFile) -> Targets:
        """Returns what `Pipeline.step` takes as targets. All ranks call it, right before the step.

        Args:
            batch: This rank's part.
            file: That it was read from: the training or the evaluation data.

        Returns:
            None on ranks that do not compute the loss.
        """
        if self._teacher is not None:
            hidden = self._teacher.hidden_states(batch.ids, batch.documents)
            return None if hidden is None else {"labels": batch.labels, "teacher_hidden": hidden}
        if batch.labels is None:
            return None
        if self.rows == "pairs":
            return {"labels": batch.labels, "reference": torch.from_numpy(self._rows_of(batch, file))}
        return {"labels": batch.labels, "weights": batch.weights} if self.rows == "weighted" else batch.labels

    def _rows_of(self, batch: Batch, file: TokenFile) -> NDArray[np.float64]:
        return self._reference[file.folder][list(batch.indices)]

    def total(self, loader: BatchLoader, batches: Iterable[Batch]) -> float:
        """Returns what the losses of some batches are divided by: labels, or sequences over all replicas.

        Args:
            loader: Counts labels.
            batches: This rank's parts of them.
        """
        if self.is_of_sequences:
            return sum(1 for _ in batches) * self._config.data.batch_size
        return loader.count_labels(batches)

    # The reference model

    def _reference_log_probs(self, pipe: Pipeline, file: TokenFile, start: Callable[[], object]) -> NDArray[np.float64]:
        """The log-probability of each text's labels, by the model as training begins.

        A whole pass over the data, so it is kept in the run's folder, and used again as long as nothing that it depends
        on has changed. With it no second copy of the model is in memory while training. All ranks have all values: 8
        bytes a text.
        """
        path = self._config.folder / REFERENCE.format(file.folder.name)
        mark = self._mark(file)
        saved = pipe.transport.gather(_load_reference(path, mark) if pipe.transport.global_rank == 0 else None, ALL)[0]
        if saved is not None:
            return saved
        start()
        log_probs = np.zeros(file.num_documents)
        loader = BatchLoader(file, self._config.data, pipe, shuffle=False, rows="pairs")
        pipe.eval()
        for batch in loader.everything():
            sums = pipe.log_probs(batch.ids, batch.labels).double().sum(1).cpu().numpy()
            for indices, values in pipe.transport.gather((batch.indices, sums[: len(batch.indices)]), ALL):
                if indices:  # none on ranks between the first and the last stage
                    log_probs[list(indices)] = values
        pipe.train()
        if pipe.transport.global_rank == 0:
            files.write(path, _pack_reference(log_probs, mark))
        return log_probs

    def _mark(self, file: TokenFile) -> str:
        """A hash of all that the reference depends on: model, weights to begin with, tokens and their length."""
        config = self._config.model
        model = {"identity": self._model.identity, "folder": config.folder, "seed": config.seed, "dtype": config.dtype}
        start = self._config.checkpoints.start
        begun = str(start.resolve()) if start else ""
        parts = [file.origin.sources, file.origin.tokenizer, self._config.data.seq_len, model, begun]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    # The teacher

    def _make_teacher(self, pipe: Pipeline) -> Pipeline:
        """A second pipeline over the same ranks, with the student's slices and its own layers, which may be more or
        wider. It gets no gradients."""
        from terapipe import hf

        dtype = next(iter(pipe.stages.values())).hidden_dtype
        decoder = hf.Decoder.from_pretrained(self._objective.teacher, dtype=dtype)
        teacher, student = decoder.shape.vocab, self._model.shape
        if student is not None and teacher != student.vocab:
            raise ValueError(
                f"a teacher must have the student's vocabulary, got {teacher} tokens in {self._objective.teacher} and "
                f"{student.vocab} in the model; take a teacher with the same tokenizer"
            )
        model: PipelineModel = decoder
        cuts = balance([1.0] * model.num_layers, pipe.plan.num_stages)
        plan = Plan(pipe.plan.sizes, pipe.plan.lengths, tuple(cuts), pipe.plan.order, pipe.plan.chunks)
        teacher_pipe = Pipeline(model, plan, transport=pipe.transport)
        teacher_pipe.requires_grad_(False)
        return teacher_pipe.eval()

    def _teacher_logits(self, hidden: Any) -> Any:
        """Called by the loss on the last stage, slice by slice: hidden states are kept, not logits, which are far
        larger."""
        assert self._teacher is not None
        return self._teacher.logits(hidden)


def _load_reference(path: Path, mark: str) -> NDArray[np.float64] | None:
    """The values that an earlier start saved; None if there are none, or of something else, or they are damaged."""
    try:
        with np.load(path) as saved:
            return saved["log_probs"] if str(saved["mark"]) == mark else None
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):  # there is none, or it is damaged
        return None


def _pack_reference(values: NDArray[np.float64], mark: str) -> bytes:
    """The file as bytes, so that it can be written like any other: beside its place, then renamed."""
    content = io.BytesIO()
    np.savez(content, log_probs=values, mark=mark)
    return content.getvalue()
