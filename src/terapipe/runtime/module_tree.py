"""The stages of a rank as one module tree, in which everything has its name in the whole model.

torch finds parameters, state and modules by walking this tree: ``state_dict``, ``get_submodule``, and the functions of
torch.distributed.checkpoint, which take a parameter's name apart and follow it module by module. So the names must be
those of real attributes. Modules of the stages are taken as they are wherever one stage holds all that is below a name;
only above that, where chunks of the model meet, there are modules that hold nothing but others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from terapipe.modeling.stage import Stage

Named = tuple[str, Tensor]


class ModelPart(nn.Module):
    """The stages of one rank, as a module. What nn.Module does is right for all but the methods below."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: dict[int, Stage] = {}  # by their numbers; not children: the tree has all that is in them

    def attach_stages(self) -> None:
        """To be called when all are there."""
        attach_stages(self, self.stages.values())
        self.training = any(stage.training for stage in self.stages.values())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("a Pipeline is not called itself; call step, evaluate or next_token_logits")

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for stage in self.stages.values():  # some of their modules may have no place in the tree
            stage.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        for stage in self.stages.values():
            stage.apply(fn)
        fn(self)
        return self

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Without the zeros that stand for weights of other ranks."""
        return ((name, b) for name, b in super().named_buffers(*args, **kwargs) if not is_placeholder(b))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """This rank's part. With ``strict=False`` that of a whole model may be given."""
        if assign:
            raise ValueError("a Pipeline's parameters cannot be replaced; load with assign=False, which copies to them")
        found = super().load_state_dict(state_dict, strict)
        held = self.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, buffer in persistent_buffers(self.stages.values()):  # two stages may have their own copies
                if name in held and buffer is not held[name]:
                    buffer.copy_(held[name])
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``cuda``, ``half``, ``to_empty`` and the like do. Other ranks, the optimizer and the buffers for
        keys and values count on devices and dtypes as they are."""
        for device, dtype in {(x.device, x.dtype) for x in (*self.parameters(), *self.buffers())}:
            probe = torch.empty(0, device=device, dtype=dtype)
            if fn(probe) is not probe:
                raise ValueError(
                    f"a Pipeline stays on its device and in its dtype, {device} and {dtype}; convert the model "
                    "before, or pass device= to Pipeline"
                )
        return self

    def share_memory(self) -> Self:
        raise ValueError("a Pipeline's parameters cannot be moved to shared memory; share the model's before")


def attach_stages(root: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Makes the stages' modules children of ``root``. Stages' own modules are not changed."""
    stages = list(stages)
    trees = [_whole_model_tree(stage) for stage in stages]
    _share_state(root, trees, "")
    for name in dict.fromkeys(name for tree in trees for name in tree._modules):
        child = _joined(_children(trees, name), name)
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
    """The buffers that belong to the state of the stages, by their names in the whole model."""
    for stage in stages:
        known = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
        for name, value in stage.state_dict(keep_vars=True).items():
            if name not in known and isinstance(value, Tensor):
                yield name, value


def is_placeholder(buffer: Tensor) -> bool:
    """Whether a buffer is a single zero, spread over the shape of a weight that another rank holds."""
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
    """A tree whose modules share the parameters and buffers of the stage's; ``names`` are old and new ones."""
    old, new = nn.Module.state_dict(stage, keep_vars=True), stage.state_dict(keep_vars=True)
    if [id(x) for x in old.values()] == [id(x) for x in new.values()]:  # tells the names of buffers, too
        names = [*names, *zip(old, new, strict=True)]
    elif len(old) > len(names):
        raise ValueError(
            f"state_dict of {type(stage).__name__} must have the entries that nn.Module gives it, in its order, under "
            f"their names in the whole model; got {len(new)} names for {len(old)} entries"
        )
    tree, placed = nn.Module(), set[tuple[str, str]]()
    for name, told in names:
        (path, _, attribute), (wanted, _, last) = name.rpartition("."), told.rpartition(".")
        if attribute != last:
            raise ValueError(
                f"a stage may rename modules, not what they hold, got {told} for {name} of {type(stage).__name__}"
            )
        if (path, wanted) not in placed:
            placed.add((path, wanted))
            _share_state(_made(tree, wanted), [stage.get_submodule(path)], wanted)
    return tree


def _made(tree: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        if part not in tree._modules:
            tree.add_module(part, nn.Module())
        tree = tree.get_submodule(part)
    return tree


def _joined(modules: Sequence[nn.Module], path: str) -> nn.Module | None:
    """One module for those that several stages have under a name."""
    modules = list(dict.fromkeys(modules))
    filled = [module for module in modules if _has_state(module)] or modules[:1]
    if len(filled) <= 1:
        return filled[0] if filled else None
    out = nn.Module()
    _share_state(out, filled, path)
    for name in dict.fromkeys(name for module in filled for name in module._modules):
        child = _joined(_children(filled, name), f"{path}.{name}")
        if child is not None:
            out.add_module(name, child)
    return out


def _children(modules: Iterable[nn.Module], name: str) -> list[nn.Module]:
    found = (module._modules.get(name) for module in modules)
    return [child for child in found if child is not None]


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


def named_parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """``list(module.named_parameters())``, for which torch walks in generators within generators: a step asks several
    times, and on a GPU the host has no time for that."""
    named: dict[int, tuple[str, nn.Parameter]] = {}
    waiting: list[tuple[str, nn.Module]] = [("", module)]
    while waiting:
        prefix, part = waiting.pop()
        for name, p in part._parameters.items():
            if p is not None and id(p) not in named:
                named[id(p)] = prefix + name, p
        for name, child in reversed(part._modules.items()):
            if child is not None:
                waiting.append((f"{prefix}{name}.", child))
    return list(named.values())
