"""What a model was when its pipeline was made, so that later changes of it are followed or refused.

Stages have copies of the model's modules, which share its tensors. Whatever somebody does to the model itself after
that (modes, adapters, hooks, other modules) does not reach the copies. So before each call the model is compared with
this record. What a module was told by a plain attribute is passed on to its copies; for anything else the stages must
be made anew.

    model.eval()                                 training of each module: passed on
    model.config.pad_token_id = 0                without effect on what stages compute: nothing to do
    model.model.layers[0].mlp.dropout.p = 0.2    a plain attribute of a module: passed on
    model.add_adapter(...)                       other modules: new stages on one device, refused on several

A step compares a few hundred modules, so it must be cheap: ``Snapshot.is_current`` (runtime/module_states.py) compares
all attributes of a module by one ``==``, and only where that fails are they looked at one by one.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from terapipe.runtime.module_states import ABSENT, Snapshot, configurations, is_plain, set_attributes

# Of the model itself: what pipelines, trainers and generation change. Notes that they add have no effect either.
OUTSIDE = {
    "forward", "zero_grad", "generate", "generation_config", "warnings_issued", "model_tags", "name_or_path",
    "peft_config", "_hf_peft_config_loaded", "hf_device_map", "is_parallelizable", "model_parallel",
}  # fmt: skip
# Hooks of transformers and peft on embeddings, for checkpointing: outputs get a gradient, which nobody looks at.
HOOKS_WITHOUT_EFFECT = ("make_inputs_require_grads", "make_inputs_require_grad")
LOSS = "_loss_function"  # of transformers' models that were given a loss
# Of any module. Stages refuse checkpointing that is switched on later themselves.
WITHOUT_EFFECT = {
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set", "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook",
    "_require_grads_hooks",
}  # fmt: skip
# Of a configuration: names, ids of tokens, and what is looked at in each call.
CONFIG_WITHOUT_EFFECT = {
    "use_cache", "return_dict", "output_hidden_states", "_output_attentions", "_attn_implementation_internal",
    "_attn_implementation", "_experts_implementation_internal", "pad_token_id", "bos_token_id", "eos_token_id",
    "name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "architectures", "dtype", "torch_dtype",
    "id2label", "label2id", "task_specific_params", "problem_type",
}  # fmt: skip


@dataclass
class Entry:
    """A module of the model.

    Args:
        name: In the model; the first one, if it has several.
        module: The module itself.
        copies: Of it, in the stages of this rank: none if another rank has it, two if two stages here do.
        snapshot: Its attributes as the copies have them.
    """

    name: str
    module: nn.Module
    copies: list[nn.Module]
    snapshot: Snapshot


class ModelRecord:
    """Compares a model with what it was, and brings copies up to date.

    Args:
        model: Which somebody may change.
        copies: Models whose modules have the same names as those of ``model``, where they have them.
    """

    def __init__(self, model: PreTrainedModel, copies: Sequence[nn.Module]) -> None:
        self._model = model
        named = [dict(each.named_modules(remove_duplicate=False)) for each in copies]
        names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name)

        def copies_of(module: nn.Module) -> list[nn.Module]:
            return list(dict.fromkeys(own[name] for own in named for name in names[module] if name in own))

        # A module that the model has under several names has one entry; its copies may be under any of the names.
        self._entries = [Entry(names[m][0], m, copies_of(m), Snapshot(m)) for m in names]
        self._configs = [Snapshot(config) for config in configurations(names)]
        self._moved = [moved for entry in self._entries for moved in _moved_buffers(entry)]

    def follow(self) -> str:
        """Passes on what was changed since, as far as it can be.

        Buffers that a stage has on another device are compared by torch's count of changes in place, and copied over.

        Returns:
            In words, the first change that asks for new stages; empty if there is none.
        """
        if change := next(filter(None, map(_config_change, self._configs)), ""):
            return change
        for entry in self._entries:
            if not entry.snapshot.is_current() and (change := self._follow(entry)):
                return change
        for theirs, ours, version in self._moved:
            if theirs._version != version[0]:
                with torch.no_grad():
                    ours.copy_(theirs)
                version[0] = theirs._version
        return ""

    @property
    def is_training(self) -> bool:
        """Whether any module of the model is in training mode: the pipeline's mode, which says what a step may do."""
        return any(entry.module.training for entry in self._entries)

    def set_modes(self) -> None:
        """Gives copies the mode, training or evaluation, of their modules, one by one: frozen parts may stay in
        evaluation mode while the rest is trained."""
        for entry in self._entries:
            for module in entry.copies:
                module.training = entry.module.training

    def _follow(self, entry: Entry) -> str:
        """Brings the copies of one module up to date. Returns why that cannot be, empty if it was done.

        The snapshot is updated attribute by attribute, so that what was passed on once is not a difference any more.
        """
        if type(entry.module) is not entry.snapshot.kind:
            return f"{_title(entry.name)} has become a {type(entry.module).__name__}"
        for name in entry.snapshot.differences():
            if change := self._follow_attribute(entry, name):
                return change
            entry.snapshot.update(name)
        return ""

    def _follow_attribute(self, entry: Entry, name: str) -> str:
        """The same for one attribute. What has no effect is ignored, plain values are copied, all else is a reason."""
        old, new = (owned.get(name, ABSENT) for owned in (entry.snapshot.attributes, entry.module.__dict__))
        is_root = entry.module is self._model
        if name in WITHOUT_EFFECT or (is_root and (name in OUTSIDE or (old is ABSENT and name != LOSS))):
            return ""
        if "_hooks" in name and _hooks_with_effect(old) == _hooks_with_effect(new):
            return ""
        if name == "_buffers":
            return self._follow_buffers(entry, old, new)
        # Losses are made of what the model itself says, stages' hooks of the kinds of rotary embeddings.
        passed_on = name == "training" or not (is_root or "rope" in name)
        if not passed_on or not (is_plain(old) and is_plain(new)):
            return _words(entry.name, name, old, new)
        for module in entry.copies:
            set_attributes(module, {name: copy.deepcopy(new) if new is not ABSENT else new})
        return ""

    def _follow_buffers(self, entry: Entry, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
        """Buffers that were replaced by others are shared with the copies again, or moved to their device."""
        kinds = [{name: isinstance(x, Tensor) for name, x in buffers.items()} for buffers in (old, new)]
        if kinds[0] != kinds[1]:
            return _words(entry.name, "_buffers", old, new)
        for name, theirs in new.items():
            if theirs is old[name]:
                continue
            for module in entry.copies:
                ours = module._buffers[name]
                assert ours is not None
                module._buffers[name] = theirs.to(ours.device)
        self._moved = [moved for each in self._entries for moved in _moved_buffers(each)]
        return ""


def _config_change(snapshot: Snapshot) -> str:
    """What was changed in a configuration, in words; empty if nothing that has an effect. Never passed on: models read
    most values when they are made."""
    if snapshot.is_current():
        return ""
    for name in snapshot.differences():
        if name not in CONFIG_WITHOUT_EFFECT:
            now = snapshot.owner.__dict__.get(name)
            return f"{name} of its configuration is {now!r}, was {snapshot.attributes.get(name)!r}"
    return ""


def _hooks_with_effect(hooks: Any) -> Any:
    """A module's hooks without those that gradient checkpointing puts on embeddings."""
    if not isinstance(hooks, dict):
        return hooks
    return {key: hook for key, hook in hooks.items() if getattr(hook, "__name__", "") not in HOOKS_WITHOUT_EFFECT}


def _moved_buffers(entry: Entry) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Buffers that stages on another device do not share: the model's, the stage's, and in a list of one number, which
    ``follow`` updates, torch's count of changes in place so far."""
    for name, theirs in entry.module._buffers.items():
        if theirs is None or theirs.is_meta or theirs.is_inference():
            continue
        for module in entry.copies:
            ours = module._buffers.get(name)
            if ours is not None and ours is not theirs and ours.shape == theirs.shape:
                yield theirs, ours, [theirs._version]


def _title(name: str) -> str:
    """A module's name in a message; that of the whole model is empty."""
    return name or "the model"


def _words(module: str, name: str, old: Any, new: Any) -> str:
    """Says what was changed in a module, for the message of a refusal."""
    what = {"_modules": "modules", "_parameters": "parameters", "_buffers": "buffers"}.get(name)
    if what is not None:
        changed = ", ".join(key for key in {**old, **new} if old.get(key) is not new.get(key)) or "their order"
        return f"other {what} in {_title(module)}: {changed}"
    if "_hooks" in name:
        return f"hooks of {_title(module)} ({name.strip('_')})"
    return f"{name} of {_title(module)}"
