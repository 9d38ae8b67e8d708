"""Checkpoints that know nothing of the layout: each tensor under its name in the whole model, saved and loaded by
torch.distributed.checkpoint, which finds the parts::

    saved on dp 1 x pp 2 x tp 1                           loaded on dp 1 x pp 1 x tp 2
    rank 0   model.h.0.weight                             rank 0   upper half of model.h.0.weight, model.h.1.weight
    rank 1   model.h.1.weight      -->  a folder  -->     rank 1   lower half of both

What is in it, by the first part of the name: ``model.`` parameters and buffers, ``optimizer.`` states of the optimizer,
``extra.`` tensors of the caller. All are tensors; what is none stands in notes.json.
"""

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from terapipe.files import sibling
from terapipe.modeling.quantized import is_composed, scales_of
from terapipe.modeling.weight_grads import to_local
from terapipe.runtime.checkpoint import manifest
from terapipe.runtime.checkpoint.frozen import Digests, FrozenBase
from terapipe.runtime.checkpoint.reader import (
    FROZEN,
    INDEX,
    NOTES,
    Reader,
    TensorsOnly,
    read_frozen,
    read_notes,
    reason,
)
from terapipe.runtime.checkpoint.writer import CheckpointWriter, Saving, Staging, State
from terapipe.runtime.comm.errors import is_connection_error
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.gradient_sync import TiedWeights

PART = "optimizer"  # of the checkpoint

Place = tuple[dict[Any, Any], Any]  # a dictionary and a key: a number in a state can be replaced, not filled


class OptimizerState:
    """The state of an optimizer for one rank's parameters. Hyperparameters are the run's, and not part of it.

    Names are those of torch's ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict``. That function and its
    setter do not serve: they save hyperparameters, as pickles; they make a state, which counts one step, where an
    optimizer has none; they round a state to its parameter's dtype; and they know nothing of tied copies.

    Quantized states are saved as they are, codes and scales of whole parameters. A scale is that of a block of values
    in a row, and parts of a parameter have other blocks than the whole: states of sharded parameters are refused.

    Args:
        optimizer: whose state is saved or loaded.
        parameters: of this rank, by their names in the whole model; those that it does not train are ignored.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        if not hasattr(optimizer, "state"):
            raise ValueError(
                f"{type(optimizer).__name__} has no state by parameter, as torch's optimizers have, so it cannot be "
                "saved for any layout; leave the optimizer out, and save its state_dict() beside"
            )
        self._optimizer, self._state = optimizer, optimizer.state
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        self._parameters = {name: p for name, p in parameters.items() if p in trained}

    def _places(self) -> dict[str, Place]:
        """Returns where each number and tensor of the state is, by its name in the checkpoint, such as
        ``state.h.0.weight.exp_avg``."""
        states = (_leaves(self._state[p], f"state.{name}") for name, p in self._parameters.items() if p in self._state)
        return {name: place for leaves in states for name, place in leaves}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the state itself, not copies, so that loading fills them; numbers become tensors."""
        return {name: _as_tensor(state[key]) for name, (state, key) in self._places().items()}

    def prepare(self, saved: Iterable[str]) -> None:
        """Makes room for the state that a checkpoint has. A parameter without one begins anew, as it did where it was
        saved. torch's loading fills tensors in place, and an optimizer makes its own only in its first step.

        Args:
            saved: the names in the checkpoint.
        """
        prefixes = {prefix for name in saved if name.startswith(f"{PART}.state.") for prefix in _prefixes(name)}
        there = {name for name in self._parameters if f"{PART}.state.{name}" in prefixes}
        for name, p in self._parameters.items():
            p.grad = None
            if name not in there:
                self._state.pop(p, None)
        self._make([p for name, p in self._parameters.items() if name in there and p not in self._state])

    def _make(self, parameters: list[Tensor]) -> None:
        """Initializes the optimizer's state with a no-op step: learning rate 0, zero gradients. Only the optimizer
        itself knows which tensors it needs, of which dtype, and where they are. What the step puts into them, a count
        of 1 among it, is overwritten by what is loaded."""
        if not parameters:
            return
        groups = [group for group in self._optimizer.param_groups if "lr" in group]
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * 0  # a rate that is a tensor stays one
        for p in parameters:
            p.grad = torch.zeros_like(p)
        self._optimizer.step()
        for p in parameters:
            p.grad = None
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def finish(self, loaded: Mapping[str, Tensor]) -> None:
        """Sets the numbers of the state. Tensors were loaded in place; numbers were not.

        Args:
            loaded: what ``tensors`` returned, now with the checkpoint's values.
        """
        for name, (state, key) in self._places().items():
            if not isinstance(state[key], Tensor):
                state[key] = type(state[key])(loaded[name].item())

    def copy(self, original: Tensor, copy: Tensor) -> None:
        """Gives a copy of a tied parameter a copy of the original's state.

        Args:
            original: the parameter whose state was loaded.
            copy: the same weight in another stage of this rank. Its state must be its own tensors, because the
                optimizer steps both, and would step shared ones twice.
        """
        self._state.pop(copy, None)
        if original in self._state:
            self._state[copy] = _clone(self._state[original])


def _leaves(state: dict[Any, Any], name: str) -> Iterator[tuple[str, Place]]:
    """Yields the numbers and tensors of nested dictionaries, each with its dotted name."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.{key}")
        elif is_quantized(value):
            if isinstance(value, DTensor):
                raise ValueError(
                    f"{name}.{key} is quantized in blocks of this rank's shard, and other layouts have other shards; "
                    "take an optimizer with whole numbers, or shard=False and tp=1, or save without the optimizer"
                )
            for part in value.__tensor_flatten__()[0]:
                yield f"{name}.{key}.{part}", (vars(value), part)
        elif isinstance(value, Tensor | int | float):
            yield f"{name}.{key}", (state, key)


def is_quantized(value: Any) -> bool:
    """Whether a tensor of a state is made of others, such as codes and scales; also inside of a DTensor.

    Args:
        value: of the state.
    """
    local = value.to_local() if isinstance(value, DTensor) else value
    return is_traceable_wrapper_subclass(local)


def _as_tensor(value: Tensor | int | float) -> Tensor:
    """Returns a tensor as it is, a number as a tensor of Python's own precision, so that no digit of it is lost."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def _clone(value: Any) -> Any:
    """Copies a state with the dictionaries inside it; what is neither dictionary nor tensor is shared."""
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def _prefixes(name: str) -> Iterator[str]:
    """Yields ``a.b``, ``a`` of ``a.b.c``. Names of parameters have dots, too, so no single place to split is right."""
    while name := name.rpartition(".")[0]:
        yield name


class Loaded(dict[str, Any]):
    """The notes of a checkpoint that was loaded.

    Args:
        notes: its notes.
        extra_names: the extra tensors that it had, of those that were asked for.
    """

    def __init__(self, notes: Mapping[str, Any], extra_names: Iterable[str]) -> None:
        super().__init__(notes)
        self.extra_names = frozenset(extra_names)


class Checkpoint:
    """One rank's parameters, buffers and optimizer, as parts of the whole model's.

    Tied parameters have one name here, and tensors of the same name are copies of each other: one is saved, all are
    loaded. Of replicas, each holds the same tensors under the same names; torch's planner divides the writing.
    It holds the tensors themselves, and is made for one save or load: the next one may find other parameters.

    Args:
        parameters: of this rank's stages, by their names in the whole model.
        buffers: of this rank's stages.
        tied: which names mean the same weight.
        optimizer: whose state is part of the checkpoint, if any.
        transport: of the pipeline.
        base: chooses the frozen weights that are left out.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        buffers: Iterable[tuple[str, Tensor]],
        tied: TiedWeights,
        optimizer: Optimizer | None,
        transport: Transport,
        base: FrozenBase,
    ) -> None:
        self._base = base
        self._tensors: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        for name, tensor in chain(((tied.canonical(name), p) for name, p in parameters), buffers):
            self._add(name, tensor)
            for scale, values in scales_of(tensor).items():  # of a quantized weight, under names below its own
                self._add(f"{name}.{scale}", values)
        self._optimizer_state = None if optimizer is None else OptimizerState(optimizer, self._tensors)
        self._transport = transport

    def _add(self, name: str, tensor: Tensor) -> None:
        """A tensor of this rank, or a copy of one that it has already under this name."""
        first = self._tensors.setdefault(name, tensor)
        if first is not tensor:
            self._copies.append((first, tensor))

    def _state(self, extra: Mapping[str, Tensor], left_out: Iterable[str]) -> State:
        """Returns what is saved, by part. It has tensors only: all else would be saved as pickles.

        Args:
            extra: tensors of the caller.
            left_out: names of the weights that the model's own files have.
        """
        moments = {} if self._optimizer_state is None else self._optimizer_state.tensors()
        scales = {f"{name}.{scale}" for name in left_out for scale in scales_of(self._tensors.get(name))}
        weights = {name: x for name, x in self._tensors.items() if name not in left_out and name not in scales}
        weights = {name: x for name, x in weights.items() if not is_composed(x)}  # what it is made of is saved
        parts = {"model": weights, PART: moments, "extra": extra}
        return {part: {name: x.detach() for name, x in tensors.items()} for part, tensors in parts.items() if tensors}

    # Saving

    def save(self, folder: Path, extra: Mapping[str, Tensor], notes: Mapping[str, Any] | None, frozen: bool) -> None:
        """Saves a checkpoint and waits until it is on the disk. Arguments are those of ``begin``. Nothing is copied
        first: nobody can change the tensors meanwhile."""
        saving = self.begin(folder, extra, notes, frozen, copy=False)
        self._wait(saving)
        saving.result()

    def begin(
        self, folder: Path, extra: Mapping[str, Tensor], notes: Mapping[str, Any] | None, frozen: bool, *, copy: bool
    ) -> Saving:
        """Begins to save a checkpoint. All ranks call it together, and begin only if all can.

        Args:
            folder: of the checkpoint, seen by all ranks.
            extra: further tensors, under names that no other rank uses.
            notes: what JSON can hold, the first rank's; None for no notes.
            frozen: whether to save frozen weights, too, that could be read again from the model's files.
            copy: whether tensors may be changed as soon as this returns.

        Returns:
            The save on its way. It may still fail, and tells all ranks so in ``Saving.result``.
        """
        self._transport.failure.refuse_stopped("a checkpoint")
        folder, writer = folder.absolute(), CheckpointWriter.of(self._transport)
        self._wait(writer.latest if writer is not None else None)  # the staging memory is one save's at a time
        if self._transport.global_rank == min(self._transport.ranks.hosts):
            shutil.rmtree(sibling(folder, "partial"), ignore_errors=True)
        left_out: Digests = {} if frozen else self._base.choose_left_out(self._tensors)
        state: State = {}
        staging = Staging() if writer is None else writer.staging
        texts, names, problem = dict[str, str](), [], None
        try:
            if notes is not None:
                texts[NOTES] = _as_json(notes)
            if left_out:
                texts[FROZEN] = _as_json({"source": self._base.source, "weights": left_out})
            names, state = list(extra), self._state(_require_tensors(extra), left_out)
            if copy:
                state = staging.copy(state)
            elif self._transport.device.type == "cuda":
                torch.cuda.synchronize(self._transport.device)  # the thread knows nothing of this one's streams
        except Exception as error:  # raised by ``_agree`` on all ranks: here it would leave the others waiting
            problem = error
        ready = self._agree(problem, names, writer is not None)
        writer = writer if writer is not None and ready else CheckpointWriter(self._transport)
        writer.staging = staging
        return writer.begin(state, folder, texts, self._transport)

    def _wait(self, saving: Saving | None) -> None:
        """Waits until a save is done on all ranks; a rank that is stuck or gone is noticed."""
        self._transport.until_all(lambda span: saving is None or saving.wait(span))

    def _agree(self, problem: Exception | None, names: list[str], ready: bool) -> bool:
        """Tells whether all ranks have a writer. It raises on all ranks if one has a problem: a save that only some
        begin would hang."""
        said = f"{type(problem).__name__}: {problem}" if problem else ""
        answers = self._transport.gather((said, names, ready), ALL)
        if problem is not None:
            raise problem
        for rank, (error, _, _) in zip(self._transport.ranks.hosts, answers, strict=True):
            if error:
                raise RuntimeError(f"rank {rank} could not begin to save: {error}")
        counts = Counter(name for _, names, _ in answers for name in names)
        name, count = max(counts.items(), key=lambda item: item[1], default=("", 1))
        if count > 1:
            raise ValueError(
                f"extra tensors must have a name of their own on every rank, got {name!r} on {count} of them; "
                "add the rank to the name"
            )
        return all(ready for _, _, ready in answers)

    # Loading

    def load(self, folder: Path, extra: Mapping[str, Tensor], *, verify: bool) -> Loaded:
        """Loads a checkpoint into the tensors as they are, in any layout. All ranks call it together.

        What can be refused is refused first, on all ranks alike: a damaged file, another frozen base. Nothing has
        changed then, and all can go on. An error after that stops the pipeline, because some weights are loaded.

        Args:
            folder: of the checkpoint.
            extra: tensors to fill, of those that the checkpoint has with this shape and dtype.
            verify: whether files are compared with their checksums first.

        Returns:
            The notes, and which of the extra tensors the checkpoint had.
        """
        damage = verify_files(folder, self._transport) if verify else ""
        if damage:
            raise ValueError(damage)
        self._check_base(folder)
        with self._transport.failure.failing_together():
            return self._load(folder, extra)

    def _check_base(self, folder: Path) -> None:
        """Refuses a checkpoint that left out weights of another base than this model has. All ranks see the same file,
        so either all compare or none does."""
        place = _place(folder)
        source, left_out = ("", {}) if place is None else read_frozen(place)
        if left_out:
            self._base.check(folder, left_out, source, self._tensors)

    @torch.no_grad()
    def _load(self, folder: Path, extra: Mapping[str, Tensor]) -> Loaded:
        """Every rank reads what it holds. The order matters: the optimizer's tensors must exist before they are filled,
        and copies of tied weights take what was filled."""
        place = _place(folder)
        if place is None:
            raise ValueError(_nothing_in(folder))
        reader, notes = Reader(place), read_notes(place)
        saved = reader.index.state_dict_metadata
        there = {name: x for name, x in extra.items() if _fits(saved.get(f"extra.{name}"), x)}
        if self._optimizer_state is not None:
            self._optimizer_state.prepare(saved)
        state = self._state(there, read_frozen(place)[1])
        self._read(state, reader)
        if self._optimizer_state is not None:
            self._optimizer_state.finish(state.get(PART, {}))
        for original, copy in self._copies:
            to_local(copy).copy_(to_local(original))
            if self._optimizer_state is not None:
                self._optimizer_state.copy(original, copy)
        return Loaded(notes, there)

    def _read(self, state: State, reader: Reader) -> None:
        """Fills the state's tensors in place. Failures become a ValueError that names the file, or the lost rank."""
        try:
            with without_dist_warning():
                load(
                    state,
                    storage_reader=reader,
                    planner=TensorsOnly(),
                    process_group=self._transport.ranks[ALL].objects,
                )
        except CheckpointException as error:
            causes = dict.fromkeys(reason(cause) for cause, _ in error.failures.values())
            raise ValueError(
                f"the checkpoint in {reader.path} is damaged, or of another model or optimizer: {'; '.join(causes)}"
            ) from None
        except RuntimeError as error:
            if is_connection_error(error):
                raise self._transport.failure.lost(
                    error, "loading a checkpoint", self._transport.ranks.others(ALL)
                ) from None
            raise


def verify_files(folder: Path, transport: Transport) -> str:
    """Compares a checkpoint's files with its manifest. All ranks call it together and get the same answer. Each reads
    its share of the files, in a thread, so that it notices meanwhile if another rank is gone.

    Args:
        folder: of the checkpoint.
        transport: of the pipeline.

    Returns:
        What is wrong; empty if the checkpoint is whole.

    Raises:
        ValueError: The checkpoint is of another format, on all ranks. It may be whole, so no caller is to pass it over
            and go on with an older one.
    """
    ranks = list(transport.ranks.hosts)
    part = ranks.index(transport.global_rank)
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(_damage, folder, part, len(ranks))
        transport.until_all(lambda span: bool(wait([work], span).done))
    shares = transport.gather(work.result(), ALL)
    if other := next((share for share in shares if isinstance(share, str)), ""):
        raise ValueError(other)
    damages = dict.fromkeys(wrong for share in shares for wrong in share)
    if not damages:
        return ""
    nothing = _nothing_in(folder)
    return nothing if nothing in damages else f"the checkpoint {folder} is damaged: {'; '.join(damages)}"


def _damage(folder: Path, part: int, parts: int) -> list[str] | str:
    """Returns what is wrong with a rank's share of the files; a single text if they are of another format. An error
    would leave this rank's neighbors waiting for its answer."""
    place = _place(folder)
    try:
        return [_nothing_in(folder)] if place is None else manifest.damage(place, part, parts)
    except manifest.FormatError as error:
        return str(error)


def _place(folder: Path) -> Path | None:
    """Returns where the checkpoint is: a crash while it was replaced may have left it beside. None if there is none."""
    marks = (manifest.MANIFEST, INDEX)
    places = (folder, sibling(folder, "old"))
    return next((place for place in places if any((place / mark).exists() for mark in marks)), None)


def _nothing_in(folder: Path) -> str:
    """Says what a folder would need to be a checkpoint: most often, the path was the wrong one."""
    return f"no checkpoint in {folder}: a folder with a file {manifest.MANIFEST}, as Pipeline.save writes it"


def _require_tensors(extra: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    for name, x in extra.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"extra values must be tensors, got {type(x).__name__} for {name!r}; notes take others")
    return extra


def _as_json(notes: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(notes), indent=1) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"notes must be what JSON can hold, got: {error}") from None


def _fits(saved: object, x: Tensor) -> bool:
    """Tells whether an entry of the index fills a tensor as it is. torch would convert a dtype without a word."""
    return isinstance(saved, TensorStorageMetadata) and (saved.size, saved.properties.dtype) == (x.shape, x.dtype)


@contextmanager
def without_dist_warning() -> Iterator[None]:
    """Silences torch's warning that torch.distributed is disabled: a pipeline of one process needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
