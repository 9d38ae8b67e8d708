"""Checkpoints that know nothing of the layout: each tensor under its name in the whole model, saved and loaded by
torch.distributed.checkpoint, which finds the parts."""

import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from terapipe.modeling.split import local
from terapipe.runtime.folders import beside, put_in_place
from terapipe.runtime.transport import ALL, Transport

# Every value of the optimizer under the name of its parameter: ranks hold different ones.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

Named = Iterable[tuple[str, Tensor]]


class Checkpoint:
    """One rank's parameters, buffers and optimizer, as parts of the whole model's.

    Tensors of the same name are copies of each other: one is saved, all are loaded.
    """

    def __init__(self, named: Named, optimizer: Optimizer | None, transport: Transport) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._module, self._optimizer, self._transport = self._tree(named), optimizer, transport

    def _tree(self, named: Named) -> nn.Module:
        """A module of this rank's parameters, which torch can name as those of the whole model."""
        root = nn.Module()
        seen: dict[str, Tensor] = {}
        for name, tensor in named:
            if name in seen:
                self._copies.append((seen[name], tensor))
                continue
            *path, leaf = name.split(".")
            module = root
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(leaf, tensor)
            else:
                module.register_buffer(leaf, tensor)
            seen[name] = tensor
        return root

    def _state(self, with_optimizer: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"model": get_model_state_dict(self._module)}
        if self._optimizer is not None and with_optimizer:
            state["optimizer"] = get_optimizer_state_dict(self._module, self._optimizer, options=FLAT)
        return state

    def save(self, folder: Path) -> None:
        """Writes beside, then renames: a crash at any moment leaves the old one or the new one whole."""
        partial = beside(folder, "partial")
        first = self._transport.global_rank == min(self._transport.hosts)
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        self._transport.gather(None, ALL)
        # Asked for the state of an optimizer that has none yet, torch would make one step.
        state = self._state(with_optimizer=self._optimizer is not None and bool(self._optimizer.state))
        with _alone_is_fine():
            save(state, checkpoint_id=partial, process_group=self._transport.everyone)
        if first:
            put_in_place(folder, partial)
        self._transport.gather(None, ALL)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Into parameters and optimizer as they are; every rank reads what it holds."""
        found = next((f for f in (folder, beside(folder, "old")) if (f / ".metadata").exists()), None)
        if found is None:
            raise ValueError(f"no checkpoint in {folder}: a folder with a file .metadata, as Pipeline.save writes it")
        self._module.zero_grad()
        saved = FileSystemReader(found).read_metadata().state_dict_metadata
        state = self._state(with_optimizer=any(name.startswith("optimizer.") for name in saved))
        try:
            with _alone_is_fine():
                load(state, checkpoint_id=found, process_group=self._transport.everyone)
        except (CheckpointException, RuntimeError) as error:
            raise ValueError(f"the checkpoint in {found} is of another model or optimizer: {error}") from None
        if self._optimizer is not None and "optimizer" in state:
            set_optimizer_state_dict(self._module, self._optimizer, state["optimizer"], options=FLAT)
        for original, copy in self._copies:
            local(copy).copy_(local(original))
            if self._optimizer is not None and original in self._optimizer.state:
                mine = self._optimizer.state[original]
                self._optimizer.state[copy] = {
                    k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in mine.items()
                }


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """A pipeline of one process needs no torch.distributed, of which torch would warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
