"""The stages of a rank as one module tree, in which everything has its name in the whole model.

torch finds parameters, state and modules by walking this tree: ``state_dict``, ``get_submodule``, and the functions of
torch.distributed.checkpoint, which take a parameter's name apart and follow it module by module. So the names must be
those of real attributes. Modules of the stages are taken as they are wherever one stage holds all that is below a name;
only above that, where chunks of the model meet, there are modules that hold nothing but others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from terapipe.modeling.quantized import is_quantized

Named = tuple[str, Tensor]


def attach_stages(root: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Makes the stages' modules children of one module. Stages' own modules are not changed. ::

        stage 0 (chunk 0)      stage 2 (chunk 1)           root
        transformer            transformer                 transformer       new: both stages have one
          wte                    h                           wte             that of stage 0 itself
          h                        2                         h               new
            0                                                  0             that of stage 0 itself
                                                               2             that of stage 2 itself

    Args:
        root: the Pipeline.
        stages: those of this rank.
    """
    stages = list(stages)
    trees = [_whole_model_tree(stage) for stage in stages]
    _share_state(root, trees, "")
    for name in dict.fromkeys(name for tree in trees for name in tree._modules):
        child = _join(_children(trees, name), name)
        if child is None:
            continue
        if hasattr(root, name):
            if not _has_state(child):
                continue
            raise ValueError(
                f"a model's modules must not have the names of Pipeline's own attributes, got {name!r}; rename it"
            )
        root.add_module(name, child)


def persistent_buffers(stages: Iterable[nn.Module]) -> Iterator[Named]:
    """The buffers that belong to the state of the stages, by their names in the whole model. Without what a quantized
    layer adds to its state: scales go with their parameter (modeling/quantized.py).

    Args:
        stages: those of this rank.
    """
    for stage in stages:
        parameters = dict(stage.named_parameters(remove_duplicate=False))
        quantized = {name.rpartition(".")[0] for name, p in parameters.items() if is_quantized(p)}
        for name, value in stage.state_dict(keep_vars=True).items():
            if name not in parameters and isinstance(value, Tensor) and not _above(name) & quantized:
                yield name, value


def _above(name: str) -> set[str]:
    """The names of the modules that something may be in: a.b and a of a.b.c."""
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def copy_shared_buffers(values: Mapping[str, Any], stages: Iterable[nn.Module]) -> None:
    """Copies values to the stages' own buffers of the same names. The tree holds one of each name, but two stages may
    have copies of it.

    Args:
        values: the buffers of the tree, by name.
        stages: those of this rank.
    """
    with torch.no_grad():
        for name, buffer in persistent_buffers(stages):
            if name in values and buffer is not values[name]:
                buffer.copy_(values[name])


def is_placeholder(buffer: Tensor) -> bool:
    """Whether a buffer is a single zero, spread over the shape of a weight that another rank holds.

    Args:
        buffer: of a stage.
    """
    return buffer.ndim > 0 and not any(buffer.stride())


def _whole_model_tree(stage: nn.Module) -> nn.Module:
    """The module in which a stage's parameters have their whole-model names: the stage, or one inside that it leaves
    out of the names. A stage that renames them in another way gets a tree of its own."""
    own = list(nn.Module.named_parameters(stage, remove_duplicate=False))
    told = list(stage.named_parameters(remove_duplicate=False))
    if [id(p) for _, p in own] != [id(p) for _, p in told]:
        raise ValueError(
            f"named_parameters of {type(stage).__name__} must list the parameters that nn.Module lists, in its order, "
            f"under their names in the whole model; got {len(told)} names for {len(own)} parameters"
        )
    prefixes = {name.removesuffix(new) for (name, _), (new, _) in zip(own, told, strict=True) if name.endswith(new)}
    if len(prefixes) <= 1 and all(name.endswith(new) for (name, _), (new, _) in zip(own, told, strict=True)):
        return stage.get_submodule("".join(prefixes).removesuffix("."))
    return _renamed_tree(stage, [(name, new) for (name, _), (new, _) in zip(own, told, strict=True)])


def _renamed_tree(stage: nn.Module, names: list[tuple[str, str]]) -> nn.Module:
    """A tree whose modules share the parameters and buffers of the stage's, under other paths::

        stage                     told names                 tree
        inner.embed  .weight      embed.weight               embed        shares the dictionaries of inner.embed
        layers.0.mlp .weight      layers.3.mlp.weight        layers.3.mlp shares those of layers.0.mlp

    Names are told by ``named_parameters``, and those of buffers by ``state_dict`` alone. Whatever the two leave open is
    refused: weights under a guessed name would be saved, and loaded elsewhere, as other weights.

    Args:
        stage: whose ``named_parameters`` and ``state_dict`` tell whole-model names.
        names: of its parameters, as nn.Module has them and as it tells them.
    """
    kind, of_parameters = type(stage).__name__, dict(names)
    old, new = nn.Module.state_dict(stage, keep_vars=True), stage.state_dict(keep_vars=True)
    if [id(x) for x in old.values()] != [id(x) for x in new.values()]:
        raise ValueError(
            f"state_dict of {kind} must have the entries that nn.Module gives it, in its order, under their names in "
            f"the whole model; got {len(new)} names for {len(old)} entries"
        )
    tree, paths = nn.Module(), dict[str, str]()
    for name, told in zip(old, new, strict=True):
        if of_parameters.get(name, told) != told:
            raise ValueError(
                f"named_parameters and state_dict of {kind} must have one name for a parameter, got "
                f"{of_parameters[name]} and {told} for {name}"
            )
        (path, _, attribute), (wanted, _, last) = name.rpartition("."), told.rpartition(".")
        if attribute != last or paths.setdefault(path, wanted) != wanted:
            raise ValueError(
                f"a stage may rename modules, not what they hold, and each as a whole: got {told} for {name} of {kind}"
            )
    for path, wanted in paths.items():
        _share_state(_submodule(tree, wanted), [stage.get_submodule(path)], wanted)
    return tree


def _submodule(tree: nn.Module, path: str) -> nn.Module:
    """The module at a path of the tree, made with those above it if it is not there."""
    for part in path.split(".") if path else ():
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        tree = tree.get_submodule(part)
    return tree


def _join(modules: Sequence[nn.Module], path: str) -> nn.Module | None:
    """One module for those that several stages have under a name: the only one with state, or a new one above them."""
    modules = list(dict.fromkeys(modules))
    filled = [module for module in modules if _has_state(module)] or modules[:1]
    if len(filled) <= 1:
        return filled[0] if filled else None
    out = nn.Module()
    _share_state(out, filled, path)
    for name in dict.fromkeys(name for module in filled for name in module._modules):
        child = _join(_children(filled, name), f"{path}.{name}")
        if child is not None:
            out.add_module(name, child)
    return out


def _children(modules: Iterable[nn.Module], name: str) -> list[nn.Module]:
    children = (module._modules.get(name) for module in modules)
    return [child for child in children if child is not None]


def _has_state(module: nn.Module) -> bool:
    """Parameters or persistent buffers, in it or below."""
    return any(_own_names(inner) for inner in module.modules())


def _own_names(module: nn.Module) -> set[str]:
    parameters = {name for name, p in module._parameters.items() if p is not None}
    buffers = {name for name, b in module._buffers.items() if b is not None}
    return parameters | (buffers - module._non_persistent_buffers_set)


def _share_state(target: nn.Module, holders: Iterable[nn.Module], path: str) -> None:
    """What the modules hold themselves becomes the target's. Of one holder the dictionaries are shared, so that a
    parameter that is replaced in one, as FSDP2 does, is replaced in both."""
    holding = [holder for holder in dict.fromkeys(holders) if _own_names(holder)]
    if len(holding) == 1 and not _own_names(target):
        for kind in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            target.__dict__[kind] = getattr(holding[0], kind)
        return
    for holder in holding:
        for name, p in holder._parameters.items():
            if p is not None and target._parameters.get(name, p) is not p:
                raise ValueError(
                    f"two stages of a rank hold different parameters of the name {f'{path}.{name}'.strip('.')}; give "
                    "each its own name in the whole model"
                )
            target._parameters[name] = p
        for name in _own_names(holder) & holder._buffers.keys():
            target._buffers.setdefault(name, holder._buffers[name])
