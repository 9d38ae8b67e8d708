"""Folders in Hugging Face's format, written from any layout.

``transformers.AutoModel.from_pretrained`` of what is written here gives the model, without terapipe. Ranks have stages,
split over tensor-parallel ranks and sharded over replicas. They meet on the disk:

    folder.parts/0.safetensors    rank 0 of the pipeline: embedding, layers 0 and 1    each by one rank of the stage
    folder.parts/1.safetensors    rank 1: layers 2 and 3, norm, head
    folder.partial/               the first rank: all parts in one model, written by transformers' save_pretrained
    folder/                       put in place by a rename, when all is on the disk

So no rank ever needs the memory of more than one whole model, only the first one of that, and on the CPU; and a crash
leaves the old folder or the new one.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from terapipe.files import copy_others, flush_files, recover, replace_folder, sibling, with_path
from terapipe.hf.stage import DecoderStage
from terapipe.hf.weights import meta_model
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.module_tree import persistent_buffers
from terapipe.runtime.pipeline import Pipeline

# What is replaced in a folder that holds a model already; all else in it, such as a tokenizer, stays.
WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
SHARD = "5GB"  # the largest file: while one is written, this process does nothing else, and others wait for it


def save_pretrained(
    pipe: Pipeline, folder: str | Path, *, finish: Callable[[Path], None] = lambda partial: None
) -> None:
    """Saves the whole model and its configuration as transformers' ``save_pretrained`` would.

    All ranks call it together. Each writes its part beside the folder, the first makes one model of them and puts it in
    place when all is written. If a crash leaves no folder, what it held before is beside it, named ``.old``.

    Args:
        pipe: A pipeline of a ``Decoder``.
        folder: Where to. All ranks must see it: a path on a shared disk, if they are on several hosts.
        finish: Called on the first rank with the folder as it was written, before it is put in place: what it adds,
            such as a tokenizer, comes with the model or not at all.
    """
    pipe.transport.failure.refuse_stopped("a model in Hugging Face's format")
    with pipe.failing_together():
        stages = {k: stage for k, stage in pipe.stages.items() if isinstance(stage, DecoderStage)}
        if len(stages) < len(pipe.stages):
            kinds = {type(stage).__name__ for stage in pipe.stages.values()}
            raise ValueError(
                f"only pipelines of Hugging Face models can be saved in their format, got stages of type "
                f"{', '.join(kinds)}; Pipeline.save writes checkpoints of any model"
            )
        if any(stage.is_quantized for stage in stages.values()):
            raise ValueError(
                "a quantized model is not written again, its weights have not changed; save what was trained: adapters "
                "by peft's save_pretrained after PipelinedModel.gather, or everything by Pipeline.save"
            )
        _Saving(pipe, list(stages.values()), Path(folder).resolve(), finish).run()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Names the folder where the system refuses to write; safetensors tells its reasons in words only.

    Args:
        folder: The one that the user knows.
    """
    try:
        with with_path(folder):
            yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from None


def write_beside(folder: Path, model: PreTrainedModel, finish: Callable[[Path], None]) -> Path:
    """Writes a folder beside the one that it is to replace, flushed to the disk, and returns its path.

    Args:
        folder: What is in it besides weights (a tokenizer, notes) is copied.
        model: With all its weights.
        finish: Adds further files; see ``save_pretrained``.
    """
    partial = sibling(folder, "partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with writing(folder):
            if folder.exists():
                copy_others(folder, partial, WEIGHTS)
            model.save_pretrained(partial, max_shard_size=SHARD)
            finish(partial)
            flush_files(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


class _Saving:
    """One ``save_pretrained``, on one rank. Each ``gather(None, ALL)`` is a barrier that also tells of failures.

    Args:
        pipe: The pipeline.
        stages: Those of this rank.
        folder: An absolute path.
        finish: See ``save_pretrained``.
    """

    def __init__(
        self, pipe: Pipeline, stages: list[DecoderStage], folder: Path, finish: Callable[[Path], None]
    ) -> None:
        self._pipe, self._stages, self._transport = pipe, stages, pipe.transport
        self._folder, self._finish = folder, finish
        self._parts, self._partial = sibling(folder, "parts"), sibling(folder, "partial")
        # The others hold the same values, or help to make them whole.
        self._writes = self._transport.dp_rank == self._transport.tp_rank == 0
        self._is_main = self._writes and self._transport.rank == 0

    def run(self) -> None:
        """Saves. The first rank writes the whole model in a thread: for a large model that takes minutes, and a rank
        that others do not hear of for so long counts as lost."""
        try:
            if self._is_main:
                self._prepare()
            self._transport.gather(None, ALL)
            self._write_part()
            self._transport.gather(None, ALL)
            with ThreadPoolExecutor(1) as thread:
                self._transport.await_one(thread.submit(self._write_whole, self._whole()) if self._is_main else None)
            if self._is_main:
                replace_folder(self._folder, self._partial)
            self._transport.gather(None, ALL)
        finally:
            if self._is_main:
                shutil.rmtree(self._parts, ignore_errors=True)
                shutil.rmtree(self._partial, ignore_errors=True)

    def _prepare(self) -> None:
        """Removes what an earlier save left behind, and puts an older folder back if a crash left none."""
        recover(self._folder)
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"a model is saved to a folder, got the file {self._folder}; take another name")
        shutil.rmtree(self._parts, ignore_errors=True)
        shutil.rmtree(self._partial, ignore_errors=True)
        self._parts.mkdir(parents=True)

    # Each rank's part

    def _write_part(self) -> None:
        """Writes this rank's tensors. Ranks that write nothing still take part in making split tensors whole."""
        state = {}
        for name, tensor in self._tensors():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # by all that hold a part of it
            if self._writes:
                state[name] = whole.detach().cpu().contiguous()
        if self._writes:
            with writing(self._parts):
                save_file(state, self._part(self._transport.rank))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters and saved buffers, by their names in the whole model."""
        yield from self._pipe.named_parameters()
        yield from persistent_buffers(self._stages)

    def _part(self, rank: int) -> Path:
        return self._parts / f"{rank}.safetensors"

    # The whole, by the first rank

    def _whole(self) -> PreTrainedModel:
        """A model on the CPU with the tensors of all parts. Refuses tensors that it has no place for, or places without
        a tensor: somebody changed the model by hand."""
        like = self._stages[0].model
        model = meta_model(like.config, kind=type(like))
        strange: list[str] = []
        for rank in range(self._transport.size):
            loaded = model.load_state_dict(load_file(self._part(rank)), strict=False, assign=True)
            strange += loaded.unexpected_keys
        model.tie_weights()
        strange += [name for name, tensor in model.state_dict().items() if tensor.is_meta]
        if strange:
            raise ValueError(
                f"the weights of a {type(like).__name__} must be those its config.json describes, got others or none "
                f"for {', '.join(strange[:3])}; undo what was added to the model, or use Pipeline.save"
            )
        if model.can_generate():
            model.generation_config = like.generation_config
        # Transformers saves on rank 0 of all processes only; the pipeline may be some of them.
        model.__dict__["should_save_on_this_rank"] = lambda is_main_process: True
        return model

    def _write_whole(self, model: PreTrainedModel) -> None:
        write_beside(self._folder, model, self._finish)
