"""AdamW for the parameters of one rank, with float32 master weights for half precision; and the learning rate.

A parameter in bfloat16 has 8 significant bits: an update of less than 1/256 of its value rounds to nothing, and most
updates are smaller. So its optimizer state has a float32 copy, which is updated, and rounded to the parameter::

    p (bfloat16) <--round-- master (float32) <--update-- exp_avg, exp_avg_sq (float32) <--- p.grad (any dtype)

The alternative, float32 parameters under `torch.autocast`, keeps the hidden states between layers, and so the messages
between stages, in float32.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from terapipe.extras import import_extra
from terapipe.modeling.weight_grads import to_local
from terapipe.runtime import HostOptimizer
from terapipe.training.config import LRConfig, OptimizerConfig

CHUNK = 1 << 26  # maximum number of gradient values converted to float32 at a time


def make_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> Optimizer:
    """Makes the optimizer of this rank.

    Weight decay applies to matrices, not to biases and norms. Frozen parameters are left out.

    Args:
        named_parameters: Of this rank's stages. There may be none: a stage whose layers are all frozen.
        config: Learning rate, betas and so on.

    Returns:
        torch's AdamW; `MasterAdamW` if a parameter is in half precision; either by `HostOptimizer` if the state is to
        be the host's; torchao's if it is to have 8 bits.
    """
    trained = [p for _, p in named_parameters if p.requires_grad]
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in trained:  # torch's foreach kernels do not accept tensors and DTensors together
        groups.setdefault((p.ndim >= 2, isinstance(p, DTensor)), []).append(p)
    param_groups = [
        {"params": ps, "weight_decay": config.weight_decay if decays else 0.0} for (decays, _), ps in groups.items()
    ]
    if config.name == "adamw-8bit":
        return _make_8bit(param_groups or [{"params": []}], trained, config)
    kind = MasterAdamW if any(_wide(p) != p.dtype for p in trained) else AdamW
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    param_groups = param_groups or [{"params": []}]  # no parameters to train on this rank
    if config.name == "adamw-offload":
        return HostOptimizer(param_groups, kind, fused=None if config.fused == "off" else True, **options)
    return kind(param_groups, fused=_choose_fused(trained, config, dtensors=kind is AdamW), **options)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of the next step.

    Args:
        optimizer: Of this rank.
        lr: For all groups.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's are: the compiled update reads the same one
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _make_8bit(param_groups: list[dict[str, Any]], trained: list[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """torchao's AdamW with a state of 8 bits, which updates parameters in float32.

    Blocks of 256 values in a row share a scale. A pipeline has whole parameters on each rank, so its blocks are those
    of one process; shards would have others, and give other weights in every layout. Parameters in half precision would
    need a copy in float32, which torchao does not keep.
    """
    halves = {p.dtype for p in trained if _wide(p) != p.dtype}
    if halves or any(isinstance(p, DTensor) for p in trained):
        got = f"parameters of {', '.join(map(str, halves))}" if halves else "parameters in shards (tp or shard)"
        raise ValueError(
            f"optimizer.name = 'adamw-8bit' needs whole float32 parameters, got {got}; take model.dtype = 'float32' "
            "without tp and shard, or optimizer.name = 'adamw'"
        )
    optim = import_extra("torchao.optim", "quantized", "optimizer.name = 'adamw-8bit'")
    optimizer: Optimizer = optim.AdamW8bit(
        param_groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=0.0
    )
    return optimizer


def learning_rate(step: int, config: LRConfig, optimizer: OptimizerConfig) -> float:
    r"""Returns the learning rate of a step.

    ::

        lr    /-----\______        warm-up: linear, peaks at its last step
             /             \       then by `kind`: cosine, linear, constant, or wsd (stable, then linear)
            /               `--    ends at min_lr_ratio of the peak
           0  warmup   ...   steps

    A pure function of the step, so that a resumed run needs no scheduler state, and a run with more steps than before
    gets the schedule of its new length.

    Args:
        step: Counted from 0.
        config: The schedule.
        optimizer: Has the peak and the number of steps.
    """
    if step < 0:
        raise ValueError(f"steps are counted from 0, got {step}")
    if step < config.warmup:
        return optimizer.lr * (step + 1) / config.warmup
    lowest = config.min_lr_ratio
    return optimizer.lr * (lowest + (1.0 - lowest) * _height(step, config, optimizer.steps))


def _height(step: int, config: LRConfig, steps: int) -> float:
    """Height after the warm-up: 1 at the peak, 0 at the end."""
    last, top = steps - 1, max(0, config.warmup - 1)
    if config.kind == "wsd":
        top = max(top, last - round(config.decay * steps))
    if config.kind == "constant" or step <= top:
        return 1.0
    progress = min(1.0, (step - top) / max(1, last - top))
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if config.kind == "cosine" else 1.0 - progress


def _choose_fused(parameters: list[nn.Parameter], config: OptimizerConfig, dtensors: bool) -> bool | None:
    """True if torch's fused kernel takes all parameters. With None, torch chooses another implementation."""
    if config.fused == "off":
        return None
    kinds = {(p.device.type, _wide(p), dtensors and isinstance(p, DTensor)): p for p in parameters}
    lacking = [
        f"{dtype} on {device}" for (device, dtype, is_dtensor), p in kinds.items() if not _has_fused(p, is_dtensor)
    ]
    if lacking and config.fused == "on":
        raise ValueError(
            f"optimizer.fused = 'on' needs torch's fused AdamW for all parameters, which there is not for "
            f"{', '.join(lacking)}; use 'auto' or 'off'"
        )
    return None if lacking else True


def _has_fused(like: nn.Parameter, is_dtensor: bool) -> bool:
    """Whether torch has the fused kernel. There is no query for it, so this runs one step on two numbers."""
    x = torch.zeros(2, dtype=_wide(like), device=like.device)
    if is_dtensor and isinstance(like, DTensor):
        x = DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    x = nn.Parameter(x)
    x.grad = torch.ones_like(x)
    try:
        AdamW([x], fused=True).step()
    except RuntimeError:
        return False
    return True


def _wide(p: Tensor) -> torch.dtype:
    """The dtype of master weights and optimizer state: at least float32."""
    return torch.promote_types(p.dtype, torch.float32)


class MasterAdamW(AdamW):
    """AdamW for parameters in half precision, where rounding would lose most updates.

    Updates are applied to float32 copies, `master` in the state; the parameters are rounded from them. Code that
    changes one must change both.

    Args:
        params: Parameters or groups, as for `torch.optim.AdamW`. Those in float32 or more get no copy.
        lr: Learning rate.
        betas: Decay rates of the running means.
        eps: Added to the denominator.
        weight_decay: Of groups that do not set their own.
        fused: As for AdamW.
    """

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
        """Updates all parameters that have a gradient.

        Args:
            closure: As for AdamW; `terapipe train` passes none.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _chunks(p for p in group["params"] if p.grad is not None):
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Calls torch's functional AdamW on the masters, instead of the parameters. On local shards: AdamW is
        elementwise, so no rank needs the values of another."""
        states = [self._state_of(p, group) for p in parameters]
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

    def _state_of(self, p: nn.Parameter, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, made at its first step, as torch's AdamW does."""
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
        """Loads a state, also one of torch's AdamW, which has no masters: then they begin as the parameters are.

        Args:
            state_dict: As `state_dict` returns it.
        """
        super().load_state_dict(state_dict)
        # super() has converted the state to the dtype of the parameters: take it from the original again, in float32.
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
    """The gradient in float32, with the placements of its parameter: a sum that is still pending is carried out."""
    grad = p.grad
    assert grad is not None
    if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
        grad = grad.redistribute(placements=p.placements)
    return to_local(grad).to(_wide(p))


def _chunks(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters, some at a time: at most CHUNK values, or one parameter. All gradients in float32 at once would take
    as much memory as all masters."""
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
