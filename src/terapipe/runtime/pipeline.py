"""The library's face: a model, a plan, and ``step``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from terapipe.modeling.dtensor import to_local
from terapipe.modeling.stage import IGNORE, HasVocabulary, Predictor, Splittable, Stage, TensorParallel
from terapipe.planning.slices import Plan
from terapipe.runtime.agreement import Terms, agree, checksum
from terapipe.runtime.checkpoint.state import Checkpoint, Loaded, Saving, verify_files
from terapipe.runtime.executor import Executor
from terapipe.runtime.failures import PipelineError, Record, in_words, is_connection_error
from terapipe.runtime.gradient_sync import GradientReducer, Sharded, match_layouts
from terapipe.runtime.inputs import Batch, Documents, Inputs, Vary, Vocabulary, check_total, lone_checksums
from terapipe.runtime.norms import total_norm
from terapipe.runtime.random_state import share_random_state
from terapipe.runtime.transport import ALL, DP, TP, Transport, local_device
from terapipe.scheduling.actions import Schedule
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.timeline import Event, Timeline
from terapipe.scheduling.validated import validated_actions

T = TypeVar("T")

SHAPES = 8  # of batches, for which buffers are kept


class Pipeline:
    """This process's part of a model that is trained by several, each sequence cut along its tokens.

    ::

        pipe = Pipeline(model, plan)                        # under torchrun; one process per stage
        optimizer = torch.optim.AdamW(pipe.parameters())    # this rank's parameters
        loss = pipe.step(input_ids, labels)                 # gradients are in .grad, as after backward()
        pipe.clip_grad_norm_(1.0)
        optimizer.step()

    ``mesh`` is what ``device_mesh(layout)`` made: replicas of the pipeline (``data``), its ranks (``pipe``), devices
    that share each operator (``tensor``); or one dimension of any DeviceMesh, whose ranks then form the pipeline; by
    default all ranks do. With ``shard``, replicas share out parameters, gradients and the optimizer's state between
    steps (FSDP2) instead of all holding all. ``vary`` says what to do with a batch of another shape than the plan's:
    refuse it, run it by the same plan resized (every rank must then be given the batch), or fill it up to the plan's
    with tokens that count for nothing. ``timeout`` is the longest, in seconds, that a rank waits for another
    before the step fails on all of them.
    """

    def __init__(
        self,
        model: Splittable,
        plan: Plan,
        *,
        mesh: DeviceMesh | None = None,
        shard: bool = False,
        vary: Vary = "refuse",
        device: torch.device | str | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.plan = plan
        self.device = local_device() if device is None else torch.device(device)
        self._transport = Transport(self.device, mesh, timeout)
        self._executor: Executor | None = None
        self._executors: dict[Plan, Executor] = {}
        self._predicts = False  # known only when asked
        with self._telling_others():
            self._check(model)
            self._check_slices = getattr(model, "check_slices", lambda shortest, recompute: None)
            self._check_slices(min(map(min, plan.lengths)), plan.recompute)
            self._check_model_step = getattr(model, "check_step", lambda **_: None)
            self.stages = self._make_stages(model, mesh)
            self._sharded = self._shard(mesh) if shard and self._transport.dp_size > 1 else {}
            self._reducer = (
                GradientReducer(self._transport) if self._transport.dp_size > 1 and not self._sharded else None
            )
            self.tied = model.tied
            self._tied = self._tied_parameters()
            self._inputs = Inputs(plan, vary, self._tile, self.rank, self.device, self._vocabulary())
            self._executor = self._executor_for(plan)

    def _make_stages(self, model: Splittable, mesh: DeviceMesh | None) -> dict[int, nn.Module]:
        cuts, parts = self.plan.boundaries, self._transport.tp_size
        self._tile = 1
        tp: tuple[TensorParallel, ...] = ()
        if mesh is not None and parts > 1:
            even = all(length % parts == 0 for lengths in self.plan.lengths for length in lengths)
            tp = (TensorParallel(mesh[TP], sequence_parallel=even),)
            self._tile = parts if even else 1
        return {k: model.stage(cuts[k], cuts[k + 1], self.device, *tp) for k in self.plan.stages_of(self.rank)}

    def _vocabulary(self) -> Vocabulary:
        """What the stages here say of it; all of them know both numbers, those of a user's own model may know none."""
        known = [stage.vocabulary for stage in self.stages.values() if isinstance(stage, HasVocabulary)]
        return Vocabulary(*known[0]) if known else Vocabulary()

    def _executor_for(self, plan: Plan) -> Executor:
        """Kept from step to step with its buffers; of other shapes only the last few."""
        executor = self._executors.pop(plan, None)
        if executor is None:
            executor = self._make_executor(plan)
        self._executors[plan] = executor
        while len(self._executors) > SHAPES:
            self._executors.pop(next(iter(self._executors)))
        return executor

    def _take_over(self, executor: Executor) -> Executor:
        """Of all shapes, only this one's and the plan's own keep their keys and values in memory."""
        for other in self._executors.values():
            if other is not executor and other.plan != self.plan:
                other.release()
        return executor

    def _make_executor(self, plan: Plan) -> Executor:
        self._check_slices(min(map(min, plan.lengths)), plan.recompute)
        stages = {k: cast(Stage, stage) for k, stage in {**self.stages, **self._sharded}.items()}
        return Executor(stages, plan, validated_actions(plan, self.rank), self._transport, self._dtype, self._finished)

    @property
    def schedule(self) -> Schedule:
        return schedule(self.plan)

    def _shard(self, mesh: DeviceMesh | None) -> dict[int, Sharded]:
        assert mesh is not None
        return {k: Sharded(stage, mesh[DP]) for k, stage in self.stages.items()}

    def _check(self, model: Splittable) -> None:
        if self.plan.num_layers != model.num_layers:
            raise ValueError(
                f"the plan splits {self.plan.num_layers} layers, the model has {model.num_layers}; "
                "the last of the plan's boundaries must be the number of layers"
            )
        size, ranks = self._transport.size, self.plan.num_ranks
        if size != ranks:
            raise ValueError(
                f"the plan is for {ranks} ranks ({self.plan.num_stages} stages, {self.plan.chunks} per rank), got "
                f"{size} processes; start {ranks} (torchrun --nproc-per-node {ranks}) or make another plan"
            )
        plans = self._transport.gather(self.plan.to_json(), ALL)
        others = [rank for rank, plan in enumerate(plans) if plan != plans[0]]
        if others:
            raise ValueError(f"all ranks must have the same plan, ranks {others} have another than rank 0")

    def _tied_parameters(self) -> list[nn.Parameter]:
        """This rank's own copies of the parameters that the first and the last stage share."""
        ends = {0, self.plan.num_stages - 1} & set(self.stages)
        found = [p for k in ends for name, p in self.stages[k].named_parameters() if name in self.tied]
        return list(dict.fromkeys(found)) if self.plan.num_stages > 1 else []

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """An error here stops the other ranks too, with this rank's error."""
        try:
            yield
        except PipelineError:
            raise
        except Exception as error:
            at = str((self._executor and self._executor.at) or "")
            others = self._transport.others(DP, TP)
            if others and is_connection_error(error):  # within an operator, or while gathering a stage
                raise self._transport.lost(error, at or "the end of a step", others) from None
            self._transport.fail(Record(self._transport.global_rank, in_words(error), at))
            raise

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self._dtype, torch.float32)

    @property
    def transport(self) -> Transport:
        """What the ranks decide together goes through it."""
        return self._transport

    @property
    def rank(self) -> int:
        """This process's place in the pipeline."""
        return self._transport.rank

    @property
    def dp_rank(self) -> int:
        """Which of the replicas this process belongs to, and so which part of the batch it takes."""
        return self._transport.dp_rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.rank == self.plan.last_rank

    # Training

    def step(
        self,
        input_ids: Tensor | None,
        labels: Tensor | None,
        documents: Documents | None = None,
        *,
        plan: Plan | None = None,
        total: float | None = None,
    ) -> Tensor:
        """Forward and backward of one batch. The mean loss over all labels that count, on every rank.

        ``input_ids`` is needed where the first stage is and ``labels`` where the last is; others may pass ``None``.
        Both are (batch, tokens) as the plan says; ``labels[b, t]`` is the token to predict at place ``t`` (see
        ``next_token_labels``), or -100 to leave that place out. Gradients are added to ``.grad``.

        ``documents`` says, on every rank, where documents begin in each sequence: ``((0, 100), (0,))`` for two in the
        first and one in the second. None sees another. By default a sequence is one document. ``plan`` is another way
        to cut this batch, the same on every rank, with the same stages. ``total``, where the last stage is, is the
        number to divide by in place of this batch's labels (see ``count_labels``): when gradients of several batches
        are accumulated, that of all of them, so that every label weighs the same.
        """
        batch = self._admit("step", input_ids, labels, documents, plan, total)
        with self._beside_earlier_gradients():
            loss = self._run(batch, train=True)
            self._sum_tied_gradients()
        return loss

    @contextmanager
    def _beside_earlier_gradients(self) -> Iterator[None]:
        """What an earlier step left is already summed over ranks: set aside, added at the end, put back on failure."""
        summed = list(self.parameters()) if self._reducer else self._tied
        earlier = [p.grad for p in summed]
        for p in summed:
            p.grad = None
        try:
            yield
        except BaseException:
            for p, grad in zip(summed, earlier, strict=True):
                p.grad = grad
            raise
        for p, grad in zip(summed, earlier, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)

    def _check_step(self, documents: Documents) -> None:
        """Whether the model is exact with such a batch."""
        several = any(len(row) > 1 for row in documents)
        training = any(stage.training for stage in self.stages.values())
        self._check_model_step(documents=several, training=training, padded=self._inputs.pads)

    def _finished(self, k: int) -> None:
        """A stage's gradients are complete on this rank; other stages are still at work."""
        if k in self._sharded:
            self._sharded[k].reduce()
            return
        match_layouts(self.stages[k].parameters())
        if self._reducer:
            self._reducer.start(self.stages[k].parameters())

    def evaluate(
        self,
        input_ids: Tensor | None,
        labels: Tensor | None,
        documents: Documents | None = None,
        *,
        total: float | None = None,
    ) -> Tensor:
        """The loss that ``step`` would return, by forwards only. Gradients are left alone."""
        return self._run(self._admit("evaluate", input_ids, labels, documents, None, total), train=False)

    def count_labels(self, *batches: Tensor) -> int:
        """How many count, over all replicas. Of every pipeline the rank with the last stage calls it, with its own."""
        with self._telling_others():
            mine = torch.tensor(sum(int((labels != IGNORE).sum()) for labels in batches), device=self.device)
            return int(self._transport.all_reduce(mine, DP))

    def _admit(
        self,
        method: str,
        input_ids: Tensor | None,
        labels: Tensor | None,
        documents: Documents | None,
        plan: Plan | None,
        total: float | None,
    ) -> Batch:
        """Checks what this rank was given, and that all ranks can go on. Where it raises, nothing has changed."""
        batch, work, error = None, "", None
        ids = targets = counted = 0
        try:
            batch = self._inputs.take(input_ids, labels, documents, plan)
            self._check_step(batch.documents)
            total = check_total(total) if self.is_last else None
            self._executor_for(batch.plan)
            work = f"{method} with {batch.plan} and documents {batch.documents or 'None'}"
            ids, targets = lone_checksums(input_ids, labels)
            if batch.labels is not None and self._transport.tp_rank == 0:
                counted = int((batch.labels != IGNORE).sum())
        except Exception as refusal:  # whatever is wrong, the other ranks must hear of it
            error = refusal
        trained = sum(p.requires_grad for p in self._tied)
        mine = Terms(error is not None, self.dp_rank, checksum(work), ids, targets, counted, len(self._tied), trained)
        terms = agree(self._transport, mine, error, work)
        assert batch is not None
        if 0 < sum(t.trained for t in terms) < sum(t.tied for t in terms):
            raise ValueError(
                f"{' and '.join(self.tied)} are one parameter, which must be frozen under all its names or under none; "
                "call requires_grad_ on the first and on the last stage alike"
            )
        return batch._replace(scale=self._scale(sum(t.counted for t in terms), total))

    def _scale(self, counted: int, total: float | None) -> Tensor:
        if total is None and not counted:
            raise ValueError(f"at least one label of a batch must count, got only {IGNORE}; leave such a batch out")
        return torch.tensor(1.0 / (total or counted), dtype=self._wide, device=self.device)

    def _run(self, batch: Batch, *, train: bool) -> Tensor:
        with self._telling_others():
            self._executor = self._take_over(self._executor_for(batch.plan))
            if train and self._transport.tp_size > 1:
                share_random_state(self._transport)
            # A loss over a vocabulary in parts is known to torch within this context only, its gradient too.
            with loss_parallel() if self._transport.tp_size > 1 else nullcontext():
                loss = self._executor.run(batch, train=train)
            if self._reducer:
                self._reducer.finish()
            for sharded in self._sharded.values():
                sharded.release()
            if self.is_last:
                loss = self._transport.all_reduce(loss, DP)
            return self._transport.broadcast(loss, self.plan.last_rank, "the loss")

    def _sum_tied_gradients(self) -> None:
        if not any(p.requires_grad for p in self._tied):  # frozen: no gradient, so that no optimizer moves it
            return
        for p in self._tied:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        first, *copies = [to_local(p.grad) for p in self._tied if p.grad is not None]
        if self.is_first and self.is_last:
            for copy in copies:
                first += copy
        else:
            first.copy_(self._transport.exchange(first, self.plan.last_rank if self.is_first else 0))
        for copy in copies:
            copy.copy_(first)

    # Generating text

    @torch.no_grad()
    def next_token_logits(self, input_ids: Tensor | None) -> Tensor:
        """The scores of the token after each sequence, (rows, vocabulary), on every rank.

        By forwards only, of any number of sequences of any length: (rows, tokens), the same on every rank of a
        pipeline. Each replica has its own, but all call it together. Call ``eval()`` before, where it matters.
        """
        self._check_predicts()
        padded, executor = self._admit_prompt(input_ids)
        with self._telling_others():
            # Text grows: hardly any length comes again. So nothing is kept for it, and nothing else is let go.
            trained, self._executor = self._executor, executor
            tokens = cast(Tensor, input_ids).shape[1]
            hidden = executor.hidden(padded if self.is_first else None, tokens)
            self._executor = trained
            logits = None if hidden is None else self._logits_at(tokens - 1, hidden)
            for sharded in self._sharded.values():
                sharded.release()
            return self._to_all(logits, len(padded))

    def _admit_prompt(self, input_ids: Tensor | None) -> tuple[Tensor, Executor]:
        """As ``_admit``, of the sequences that text is to follow."""
        made, work, error = None, "", None
        try:
            padded = self._inputs.prompt(input_ids)
            rows, tokens = padded.shape
            plan = Plan((rows,), ((tokens,),), self.plan.boundaries, self.plan.order, self.plan.chunks)
            made = padded, self._make_executor(plan)
            work = f"next_token_logits of {rows} rows of {cast(Tensor, input_ids).shape[1]} tokens"
        except Exception as refusal:
            error = refusal
        agree(self._transport, Terms(error is not None, self.dp_rank, checksum(work)), error, work)
        assert made is not None
        return made

    def _check_predicts(self) -> None:
        """Asked once. Refused on all ranks alike, before anything is sent: the pipeline can go on training."""
        if self._predicts:
            return
        last = self.stages.get(self.plan.num_stages - 1)
        missing = "" if last is None or isinstance(last, Predictor) else type(last).__name__
        found = next(filter(None, self.gather(missing)), None)
        if found:
            raise ValueError(
                f"generating text needs a last stage with a method logits(hidden), as Predictor in modeling/stage.py "
                f"describes it; {found} has none"
            )
        self._predicts = True

    def _logits_at(self, place: int, hidden: Tensor) -> Tensor:
        """Where devices share out the tokens, each has some of the places, one of them this one; all give one."""
        owner, index = divmod(place, hidden.shape[1])
        last = {**self.stages, **self._sharded}[self.plan.num_stages - 1]
        logits = cast(Predictor, last).logits(hidden[:, index : index + 1])
        whole: Tensor = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return whole[:, owner].to(self._wide).contiguous()

    def _to_all(self, logits: Tensor | None, rows: int) -> Tensor:
        """From where the last stage is, which alone knows the vocabulary."""
        source = self.plan.last_rank
        width = torch.tensor(0 if logits is None else logits.shape[1], device=self.device)
        vocabulary = int(self._transport.broadcast(width, source, "the size of the vocabulary"))
        if logits is None:
            logits = torch.empty(rows, vocabulary, dtype=self._wide, device=self.device)
        return self._transport.broadcast(logits, source, "the logits")

    # Gradients

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model, on every rank; shared parameters count once."""
        copies = self._tied if self.is_last and not self.is_first else self._tied[1:]
        skip = {id(p) for p in copies}
        counted = [p for p in self.parameters() if id(p) not in skip]
        return total_norm(counted, norm_type, self._transport, self._wide)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, over the whole model; returns the norm before clipping."""
        norm = self.grad_norm(norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for p in self.parameters():
            if p.grad is not None:
                to_local(p.grad).mul_(scale.to(p.grad.dtype))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        for stage in self.stages.values():
            stage.zero_grad(set_to_none)

    # The modules

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names they have in the whole model, each once."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the whole model's state."""
        return {name: value for stage in self.stages.values() for name, value in stage.state_dict().items()}

    def save(
        self,
        folder: str | Path,
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Tensor] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """A checkpoint of the whole model, and of the optimizer's state, that loads in any layout. All ranks call it
        together, with a folder that all of them see. What the folder held before is replaced when all is written.

        ``extra`` are further tensors of this rank, under names that no other rank uses; ``notes`` is what JSON can
        hold, the same on all ranks. If it cannot be written, all ranks raise the same OSError, and may go on training.
        """
        self._checkpoint(optimizer).save(Path(folder), extra or {}, notes)

    def save_in_background(
        self,
        folder: str | Path,
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Tensor] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Saving:
        """As ``save``, of the state at this moment: it is copied to the host's memory, and written while training goes
        on. Another save waits until this one is done. ``result()`` of what is returned waits for it and raises what
        went wrong; it must be called before the process ends."""
        return self._checkpoint(optimizer).begin(Path(folder), extra or {}, notes, copy=True)

    def load(
        self,
        folder: str | Path,
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Tensor] | None = None,
        verify: bool = True,
    ) -> Loaded:
        """What ``save`` wrote, in this or any other layout; nothing in it is run, whoever wrote it. Learning rate and
        the like stay as they are. An optimizer of which nothing was saved begins anew.

        Fills the ``extra`` tensors that the checkpoint has in the same shape, and leaves the others. Returns the notes,
        a dictionary, whose ``found`` names the extra tensors that were there.

        With ``verify``, all files are first compared with their checksums. If one is damaged or missing, all ranks
        raise the same ValueError, and model and optimizer are as before.
        """
        wrong = verify_files(Path(folder), self._transport) if verify else ""
        if wrong:
            raise ValueError(wrong)
        with self._telling_others():
            return self._checkpoint(optimizer).load(Path(folder), extra or {})

    def _checkpoint(self, optimizer: Optimizer | None) -> Checkpoint:
        named = [(self.tied[0] if name in self.tied else name, p) for name, p in self.named_parameters()]
        known = {name for stage in self.stages.values() for name, _ in stage.named_parameters(remove_duplicate=False)}
        buffers = [(name, b) for name, b in self.state_dict().items() if name not in known and isinstance(b, Tensor)]
        return Checkpoint([*named, *buffers], optimizer, self._transport)

    def train(self, mode: bool = True) -> Self:
        for stage in self.stages.values():
            stage.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    # Looking back

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in the order of the pipeline. All ranks must call it together."""
        return self._transport.gather(value)

    def timeline(self) -> Timeline:
        """What every rank did in the last step, and when. All ranks must call it together."""
        assert self._executor is not None
        return self._timeline(self.gather(self._executor.events()))

    def timeline_on_first(self) -> Timeline | None:
        """The same, on the pipeline's first rank only: the events of many ranks need not go to all of them."""
        assert self._executor is not None
        events = self._transport.collect(self._executor.events())
        return None if events is None else self._timeline(events)

    def _timeline(self, events: list[list[Event]]) -> Timeline:
        assert self._executor is not None
        return Timeline.of(self._executor.plan, [event for rank in events for event in rank])
