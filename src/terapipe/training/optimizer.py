"""AdamW over one rank's parameters: which decay, by which kernels, and float32 copies of those in half precision."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from terapipe.config import OptimizerConfig
from terapipe.modeling.dtensor import to_local

CHUNK = 1 << 26  # values whose gradients are held in float32 at the same time


def make_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> Optimizer:
    """Matrices decay, biases and norms do not; what is frozen is left out. Half precision has float32 masters."""
    trained = [p for _, p in named_parameters if p.requires_grad]
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in trained:  # torch's kernels for many tensors at once take no mixture of whole tensors and parts
        groups.setdefault((p.ndim >= 2, isinstance(p, DTensor)), []).append(p)
    made = [
        {"params": ps, "weight_decay": config.weight_decay if decays else 0.0} for (decays, _), ps in groups.items()
    ]
    kind = MasterAdamW if any(_wide(p) != p.dtype for p in trained) else AdamW
    return kind(
        made or [{"params": []}],  # nothing to train here: an optimizer that does nothing
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=_fused(trained, config, in_parts=kind is AdamW),
    )


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _fused(parameters: list[nn.Parameter], config: OptimizerConfig, in_parts: bool) -> bool | None:
    """None leaves the choice of another implementation to torch."""
    if config.fused == "off":
        return None
    kinds = {(p.device.type, _wide(p), in_parts and isinstance(p, DTensor)): p for p in parameters}
    lacking = [f"{dtype} on {device}" for (device, dtype, parts), p in kinds.items() if not _has_fused(p, parts)]
    if lacking and config.fused == "on":
        raise ValueError(
            f"optimizer.fused = 'on' needs torch's fused AdamW for all parameters, which there is not for "
            f"{', '.join(lacking)}; use 'auto' or 'off'"
        )
    return None if lacking else True


def _has_fused(like: nn.Parameter, parts: bool) -> bool:
    """Found out by trying."""
    x = torch.zeros(2, dtype=_wide(like), device=like.device)
    if parts and isinstance(like, DTensor):
        x = DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    x = nn.Parameter(x)
    x.grad = torch.ones_like(x)
    try:
        AdamW([x], fused=True).step()
    except RuntimeError:
        return False
    return True


def _wide(p: Tensor) -> torch.dtype:
    """At least float32: the precision in which updates are added up."""
    return torch.promote_types(p.dtype, torch.float32)


class MasterAdamW(AdamW):
    """AdamW for parameters in half precision, in which most updates would be rounded away: they are made to float32
    copies, ``master`` in the state, of which the parameters are roundings. Whoever changes one must change both."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused=fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _chunks(p for p in group["params"] if p.grad is not None):
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """On local parts: every value is updated by itself."""
        states = [self._made(p, group) for p in parameters]
        masters = [to_local(state.get("master", p)) for p, state in zip(parameters, states, strict=True)]
        adamw(
            masters,
            [_gradient(p) for p in parameters],
            [to_local(state["exp_avg"]) for state in states],
            [to_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for p, state, master in zip(parameters, states, masters, strict=True):
            if "master" in state:
                to_local(p).copy_(master)

    def _made(self, p: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            master = p.detach().to(_wide(p))
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            if master.dtype != p.dtype:
                state["master"] = master
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch has rounded the state to the parameters' precision.
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        mine = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, p in zip(names, mine, strict=True):
            saved, wide = state_dict["state"].get(name), _wide(p)
            if saved and wide != p.dtype:
                for key in ("exp_avg", "exp_avg_sq"):
                    self.state[p][key] = saved[key].to(p.device, wide)
                self.state[p]["master"] = saved.get("master", p.detach()).to(p.device, wide)
                to_local(p).copy_(to_local(self.state[p]["master"]))


def _gradient(p: nn.Parameter) -> Tensor:
    grad = p.grad
    assert grad is not None
    if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
        grad = grad.redistribute(placements=p.placements)
    return to_local(grad).to(_wide(p))


def _chunks(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    size = 0
    for p in parameters:
        size += to_local(p).numel()
        if chunk and size > CHUNK:
            yield chunk
            chunk, size = [], to_local(p).numel()
        chunk.append(p)
    if chunk:
        yield chunk
