"""Optimizers whose state is in the memory of the host: torchao's ``CPUOffloadOptimizer``, after gradients are clipped.

torchao copies a gradient to the host as soon as a backward has made it, by a hook of its parameter. What is done to
gradients after that, clipping above all, would not reach the copy. So its hooks are called here, by ``step``::

    GPU    backward   clip    | g0 -->  g1 -->  g2 -->             p0 <--  p1 <--  p2 <--
    host                      |         update 0  update 1  update 2

Copies and updates of different parameters overlap, as ever; only copies and the backward no longer do. Clipping by a
norm of all gradients forbids that anyway: the norm is known when the last of them is there.

torchao's copy of a weight is made once, when the optimizer is. Whoever changes weights later (a checkpoint that is
loaded) would see them overwritten by the next step. Here a weight that has changed since the last step is copied again.
Torch does not count changes through ``.data``, so they are not seen: write ``with torch.no_grad(): p.clamp_(-1, 1)``.
Of weights with float32 copies (``MasterAdamW``) both must be changed, as on the device.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from terapipe.extras import import_extra

SMALLEST = 4096  # numbers of a parameter whose state is the host's; that of smaller ones stays on the device


class HostOptimizer(Optimizer):
    """torchao's ``CPUOffloadOptimizer`` as an optimizer like any other: with groups, a state by parameter, and
    gradients as they are when it steps.

    Args:
        params: Parameters or groups of them, on GPUs. None may be a shard of a larger one.
        optimizer_class: Which updates on the host.
        minimal_size: As torchao has it.
        offload_gradients: As torchao has it. Gradients are dropped in ``step``, so accumulation is no obstacle here;
            those of parameters under ``minimal_size`` stay.
        **options: Those of ``optimizer_class``.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer] = AdamW,
        *,
        minimal_size: int = SMALLEST,
        offload_gradients: bool = False,
        **options: Any,
    ) -> None:
        groups = _groups_of(params)
        for group in groups:
            _refuse(group["params"])
        if optimizer_class is AdamW:
            options = {"fused": True, **options}  # as torchao has it
        inner = torchao_class("an optimizer on the host")(
            [dict(group) for group in groups], optimizer_class, minimal_size=minimal_size,
            offload_gradients=offload_gradients, **options,
        )  # fmt: skip
        defaults = optimizer_class([torch.zeros(0, requires_grad=True)], **options).defaults
        self._take_over(inner, groups, defaults)

    @classmethod
    def adopt(cls, inner: Any) -> "HostOptimizer":
        """Puts an optimizer around one of torchao that exists. It has a group for each parameter, as torchao's has.

        Args:
            inner: A ``CPUOffloadOptimizer``.
        """
        one = cls.__new__(cls)
        groups = [dict(group) for group in inner.d_param_groups]
        groups += [{**host.param_groups[0], "params": [p]} for p, host in inner.optim_dict.items()]
        for group in groups:
            _refuse(group["params"])
        one._take_over(inner, groups, {})
        return one

    def _take_over(self, inner: Any, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        """Makes this the optimizer of the parameters, and ``inner`` what it steps with."""
        super().__init__(groups or [{"params": []}], defaults)
        self._inner = inner
        self._takes = {p: _remove_hook(p, inner) for p in inner.param_d2h_map}
        self._versions = {p: p._version for p in inner.param_d2h_map}
        self.state = HostStates(inner)  # type: ignore[assignment]
        self._settings = self._groups_inside()

    def _groups_inside(self) -> dict[Tensor, dict[str, Any]]:
        """By parameter, the group of the optimizer inside that has it: where a learning rate must be set."""
        small = () if self._inner.d_opt is None else self._inner.d_opt.param_groups
        groups = {p: group for group in small for p in group["params"]}
        return groups | {p: one.param_groups[0] for p, one in self._inner.optim_dict.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, while the optimizer is made.

        Args:
            param_group: With ``params``.
        """
        if hasattr(self, "_inner"):
            raise ValueError("torchao's CPUOffloadOptimizer takes no more parameters later; make another optimizer")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient, with the gradients as they are now.

        Args:
            closure: As for any optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for p in group["params"]:
                if p in self._settings:
                    self._settings[p].update(options)
                elif p.grad is not None:
                    raise ValueError(
                        "a parameter was frozen when the optimizer was made, and torchao's CPUOffloadOptimizer takes "
                        "no more later; make the optimizer after requires_grad is set"
                    )
        self._inner.queue.clear()  # of a step that did not come to its end
        for p, take in self._takes.items():
            if p._version != self._versions[p]:
                self._inner.param_d2h_map[p].copy_(p)
            take(p)  # copies the gradient, if there is one
        self._inner.step()
        self._versions = {p: p._version for p in self._takes}
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; tensors go where this optimizer has them.

        Args:
            state_dict: As ``state_dict`` returns it.
        """
        states: dict[Tensor, dict[str, Any]] = {}
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
            numbered = zip(saved["params"], group["params"], strict=True)
            states |= {p: state_dict["state"][n] for n, p in numbered if n in state_dict["state"]}
        for p, host in self._inner.optim_dict.items():
            _load_states(host, [states.get(p)])
        if self._inner.d_opt is not None:
            small = [p for group in self._inner.d_opt.param_groups for p in group["params"]]
            _load_states(self._inner.d_opt, [states.get(p) for p in small])
        self._settings = self._groups_inside()  # loading makes others


def _load_states(optimizer: Optimizer, states: list[dict[str, Any] | None]) -> None:
    """Gives an optimizer the states of its parameters, in order. It loads them itself: it may want float32 copies that
    the optimizer which saved them had not."""
    present = {number: state for number, state in enumerate(states) if state is not None}
    optimizer.load_state_dict({"state": present, "param_groups": optimizer.state_dict()["param_groups"]})


class HostStates(MutableMapping[Tensor, dict[str, Any]]):
    """The states of a ``CPUOffloadOptimizer`` by the parameter of the device, wherever they are.

    Args:
        inner: The optimizer.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def _place(self, p: Tensor) -> tuple[Any, Tensor]:
        """The states that one parameter's is among, and its key there."""
        if p in self._inner.optim_dict:
            return self._inner.optim_dict[p].state, self._inner.param_d2h_map[p]
        return ({} if self._inner.d_opt is None else self._inner.d_opt.state), p

    def __contains__(self, p: object) -> bool:
        assert isinstance(p, Tensor)
        states, key = self._place(p)
        return key in states

    def __getitem__(self, p: Tensor) -> dict[str, Any]:
        states, key = self._place(p)
        if key not in states:
            raise KeyError(p)  # a defaultdict would make one
        state: dict[str, Any] = states[key]
        return state

    def __setitem__(self, p: Tensor, state: dict[str, Any]) -> None:
        states, key = self._place(p)
        states[key] = state

    def __delitem__(self, p: Tensor) -> None:
        states, key = self._place(p)
        del states[key]

    def __iter__(self) -> Iterator[Tensor]:
        small = () if self._inner.d_opt is None else self._inner.d_opt.state
        return iter([p for p in (*self._inner.optim_dict, *small) if p in self])

    def __len__(self) -> int:
        return len(list(iter(self)))


def torchao_class(user: str) -> Any:
    """torchao's ``CPUOffloadOptimizer``.

    Args:
        user: What needs it, for the message if torchao is not installed.
    """
    return import_extra("torchao.optim", "quantized", user).CPUOffloadOptimizer


def is_torchao_class(kind: Any, *, itself: bool = False) -> bool:
    """Whether a class is torchao's, or one of its subclasses. By name, so that torchao need not be there.

    Args:
        kind: Any object.
        itself: Whether subclasses do not count.
    """
    bases = getattr(kind, "__mro__", ())[: 1 if itself else None]
    return any(base.__module__.startswith("torchao.") and base.__name__ == "CPUOffloadOptimizer" for base in bases)


def refuse_host_state(device: torch.device, *, in_parts: bool) -> None:
    """Refuses what torchao would assert, or get wrong, and says what to do.

    Args:
        device: Of a parameter.
        in_parts: Whether it is a shard.
    """
    if in_parts:
        raise ValueError(
            "an optimizer with its state on the host (torchao's CPUOffloadOptimizer) needs whole parameters, got "
            "shards; take tp=1 and shard=False, or another optimizer"
        )
    if device.type not in ("cuda", "xpu"):
        raise ValueError(
            "an optimizer with its state on the host (torchao's CPUOffloadOptimizer) needs parameters on a GPU, got "
            f"some on {device}, whose memory is the host's already; take AdamW itself (optimizer.name = 'adamw')"
        )


def _refuse(parameters: list[Tensor]) -> None:
    for p in parameters:
        if p.requires_grad:
            refuse_host_state(p.device, in_parts=isinstance(p, DTensor))


def _groups_of(params: Any) -> list[dict[str, Any]]:
    """Groups with lists of parameters, of all that torch's optimizers take: parameters, pairs of name and parameter,
    or groups of either, of which one may also be a single parameter."""
    listed = list(params)
    groups = [dict(g) for g in listed] if listed and isinstance(listed[0], dict) else [{"params": listed}]
    for group in groups:
        own = group["params"]
        members = [own] if isinstance(own, Tensor) else list(own)
        group["params"] = [member[1] if isinstance(member, tuple) else member for member in members]
    return groups


def _remove_hook(p: Tensor, inner: Any) -> Callable[[Tensor], None]:
    """Takes torchao's hook off a parameter: the one that knows this optimizer."""
    hooks: Any = p._post_accumulate_grad_hooks or {}
    for key, hook in list(hooks.items()):
        if any(cell.cell_contents is inner for cell in getattr(hook, "__closure__", None) or ()):
            mine: Callable[[Tensor], None] = hooks.pop(key)
            return mine
    raise RuntimeError("this torchao has no hook that takes gradients, on which terapipe relies; tested with 0.18")
