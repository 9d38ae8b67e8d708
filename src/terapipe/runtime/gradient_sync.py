"""Gradients of a step: summed over slices, replicas and copies before anybody sees them.

Replicas of a stage have their gradients summed once per step (all-reduce), or each holds a part of the stage's state
(FSDP2). ``gradient_sync`` picks one of the three classes; the rest of the runtime knows only ``GradientSync``.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from terapipe.modeling.quantized import is_quantized
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import Stage
from terapipe.modeling.weight_grads import (
    GradientSum,
    add_to_main_grad,
    is_half,
    main_grad,
    match_main_grad,
    round_to_grad,
    sum_in_float32,
    summed_in_float32,
    to_local,
)
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.mesh import DP, TP
from terapipe.runtime.comm.transport import Transport

BUCKET = 25 << 20  # bytes that are summed in one message


def gradient_sync(stages: Mapping[int, Stage], transport: Transport, *, shard: bool) -> "GradientSync":
    """Chooses how gradients are summed over replicas: not at all, by all-reduce, or by FSDP2.

    Args:
        stages: those of this rank, by number.
        transport: which tells how many replicas there are.
        shard: whether replicas share out the stages' state. Parameters then become DTensors.
    """
    if transport.dp_size == 1:
        return GradientSync(stages)
    return ShardedSync(stages, transport.ranks.submesh(DP)) if shard else AllReduceSync(stages, transport)


class GradientSync:
    """One replica only: there is nothing to sum. Also what the other two have in common."""

    sums_in_place = False  # whether .grad must hold this step's gradients only until ``finish``

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._modules = stages

    @property
    def stages(self) -> dict[int, Stage]:
        """The stages as the executor calls them."""
        return dict(self._modules)

    def stage_done(self, k: int) -> None:
        """To be called when a stage's gradients are complete on this rank; other stages are still at work.

        Args:
            k: the number of the stage.
        """
        parameters = [p for _, p in named_parameters_of(self._modules[k])]
        round_to_grad(parameters)
        match_layouts(parameters)

    def finish(self) -> None:
        """After the last stage's ``stage_done``, and after forwards only."""


class AllReduceSync(GradientSync):
    """Sums gradients over replicas, in buckets, while the pipeline drains; those of half precision in float32. ::

        stage 1 (ends first)   ... B 1 B 0 | all-reduce of its buckets ------>|
        stage 0                ...     B 1   B 0 | all-reduce ------>| finish: wait for both

    A bucket is up to 25 MB of gradients in one message: a message for each bias would cost more in latency than in
    bytes. Where a gradient fills a bucket by itself, it is summed in place instead of being copied.
    """

    sums_in_place = True

    def __init__(self, stages: Mapping[int, Stage], transport: Transport) -> None:
        super().__init__(stages)
        self._transport = transport
        self._pending: list[tuple[list[Tensor], Tensor, dist.Work]] = []

    def stage_done(self, k: int) -> None:
        """Called on all replicas in the same order."""
        parameters = [p for _, p in named_parameters_of(self._modules[k])]
        match_layouts(parameters)
        for bucket in _buckets(list(_gradients(parameters))):
            alone = len(bucket) == 1 and bucket[0].is_contiguous()  # large ones are not copied
            flat = bucket[0] if alone else torch.cat([g.flatten() for g in bucket])
            self._pending.append((bucket, flat, self._transport.start_sum(flat)))

    def finish(self) -> None:
        for bucket, flat, work in self._pending:
            self._transport.finish_sum(work)
            if flat is bucket[0]:
                continue
            parts = torch.split(flat, [g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])
        self._pending.clear()
        for module in self._modules.values():
            round_to_grad(module.parameters())


class ShardedSync(GradientSync):
    """FSDP2: it sums gradients when it reduces them to the part that each replica holds."""

    def __init__(self, stages: Mapping[int, Stage], mesh: DeviceMesh) -> None:
        super().__init__(stages)
        self._sharded = {k: Sharded(module, mesh) for k, module in stages.items()}

    @property
    def stages(self) -> dict[int, Stage]:
        return dict(self._sharded)

    def stage_done(self, k: int) -> None:
        round_to_grad(self._modules[k].parameters())
        self._sharded[k].reduce()

    def finish(self) -> None:
        for k, sharded in self._sharded.items():
            sharded.release()
            round_to_grad(self._modules[k].parameters())  # FSDP calls hooks of the shards, too


class TiedWeights:
    """This rank's copies of one parameter that the first and the last stage share, such as an embedding that is also
    the head; there may be none.

    Each stage has its own copy. Copies stay equal because their gradients are summed after every step and any optimizer
    then treats them alike.
    """

    def __init__(
        self, names: tuple[str, ...], stages: Mapping[int, nn.Module], plan: Plan, transport: Transport
    ) -> None:
        self.names, self._transport = names, transport
        self._first_rank, self._last_rank = 0, plan.last_rank
        ends = sorted({0, plan.num_stages - 1} & set(stages))
        copies = [p for k in ends for name, p in stages[k].named_parameters() if name in names]
        self.parameters: list[nn.Parameter] = list(dict.fromkeys(copies)) if plan.num_stages > 1 else []

    @property
    def trained(self) -> int:
        """How many of the copies are not frozen."""
        return sum(p.requires_grad for p in self.parameters)

    @property
    def duplicates(self) -> list[nn.Parameter]:
        """Copies that must not be counted again where the whole model is summed over."""
        here = self._transport.rank
        return self.parameters if here == self._last_rank and here != self._first_rank else self.parameters[1:]

    def canonical(self, name: str) -> str:
        """The one name that checkpoints have for all copies."""
        return self.names[0] if name in self.names else name

    def check_frozen(self, trained: int, copies: int) -> None:
        """Refuses copies of which some are frozen and others not, on all ranks alike.

        Args:
            trained: how many copies of all ranks are not frozen.
            copies: how many there are.
        """
        if 0 < trained < copies:
            raise ValueError(
                f"{' and '.join(self.names)} are one parameter, which must be frozen under all its names or under "
                "none; call requires_grad_ on the first and on the last stage alike"
            )

    def sum_gradients(self) -> None:
        """All copies get the sum of their gradients, equal to the last bit."""
        if not self.trained:  # frozen: no gradient, so that no optimizer moves it
            return
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        first, *copies = [to_local(p.grad) for p in self.parameters if p.grad is not None]
        here = self._transport.rank
        if self._first_rank == self._last_rank:
            for copy in copies:
                first += copy
        else:
            other = self._last_rank if here == self._first_rank else self._first_rank
            first.copy_(self._transport.channel.exchange(first, other))
        for copy in copies:
            copy.copy_(first)


REASONS = (
    "nothing is trained by this step. Likely reasons: no label counts (all are -100); adapters were off, or another "
    "one was active, in the forward; the loss does not depend on the model's output, or is flat (all advantages are "
    "zero); gradients were cleared before they were used"
)


class ZeroGradients:
    """Warns once of a step that trains nothing: every trainable gradient is exactly zero, or there is none. It reads
    nothing from a GPU: it looks at which gradients are there, and at norms that somebody
    has read already."""

    def __init__(self) -> None:
        self._is_said = False

    def check_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Warns if no trainable parameter has a gradient. To be called at the end of a backward.

        Args:
            parameters: of this rank. One without trainable parameters is right to have no gradients.
        """
        if self._is_said:
            return
        trainable = [p for p in parameters if p.requires_grad]
        if trainable and all(p.grad is None for p in trainable):
            self._say(f"none of the {len(trainable)} trainable parameters of this rank has got a gradient")

    def check_norm(self, norm: float) -> None:
        """To be called with a norm that is on the host anyway.

        Args:
            norm: of all gradients.
        """
        if norm == 0 and not self._is_said:
            self._say("the gradients of all trainable parameters are exactly zero")

    def _say(self, what: str) -> None:
        self._is_said = True
        warnings.warn(f"{what}: {REASONS}", stacklevel=3)


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


@contextmanager
def accumulate_step(
    module: nn.Module,
    sync: GradientSync,
    tied: TiedWeights,
    zero_gradients: ZeroGradients,
    wait_for_hooks: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Around the backwards of one batch: adds their gradients to ``.grad`` as one backward of the whole model would.

    Gradients are first summed over slices, replicas and tied copies; then hooks are called; then the gradients of
    earlier steps are added. The contexts are nested in the reverse order: what is entered last ends first. ::

        enter                                           leave
        hooks of .grad set aside                        5. call them once, with the complete .grad
          earlier .grad set aside                       4. add it
            hooks of tensors set aside                  3. call them once, with the step's gradient
              sums of half precision in float32         2. gather no more of them; sum copies of tied weights
                the backwards of all slices             1. ``sync``: sum over replicas, round to .grad

    Args:
        module: that of all parameters.
        sync: sums gradients over replicas, while the backwards run.
        tied: sums those of copies, after them.
        zero_gradients: is told of a step that trains nothing.
        wait_for_hooks: returns when all ranks have called theirs.
    """
    parameters = [p for _, p in named_parameters_of(module)]
    copies = set(tied.parameters)
    summed = [p for p in parameters if sync.sums_in_place or p in copies or is_half(p) or p._backward_hooks]
    with hooks_when_complete(parameters), accumulate_into_grad(summed), tensor_hooks_when_complete(parameters):
        with summed_in_float32(parameters):
            yield
        tied.sum_gradients()
        zero_gradients.check_parameters(parameters)  # before hooks, which may use gradients up
    if wait_for_hooks is not None:
        wait_for_hooks()


@contextmanager
def accumulate_into_grad(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Sets the gradients of earlier steps aside, which are summed over ranks already; adds them at the end. After a
    failure they are as before.

    Args:
        parameters: whose gradients are summed in place.
    """
    listed = list(parameters)
    earlier = [p.grad for p in listed]
    for p in listed:
        p.grad = None
    try:
        yield
    except BaseException:
        for p, grad in zip(listed, earlier, strict=True):
            p.grad = grad
        raise
    for p, grad in zip(listed, earlier, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad.add_(grad)


@contextmanager
def gradients_restored(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Whatever happens inside, gradients are as before, and no hook is called for them.

    Args:
        parameters: whose gradients.
    """
    listed = list(parameters)
    earlier = [p.grad for p in listed]
    with _hooks_set_aside(listed), _tensor_hooks_set_aside(listed):
        try:
            for p in listed:
                p.grad = None
            yield
        finally:
            for p, grad in zip(listed, earlier, strict=True):
                p.grad = grad


@contextmanager
def hooks_when_complete(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Calls what ``register_post_accumulate_grad_hook`` registered once, at the end, for parameters with a gradient.

    Autograd would call it after each slice, with a part of the gradient, and not at all for weights whose gradients
    are added in place. After a failure nothing is called.
    """
    with _hooks_set_aside(parameters) as hooks:
        yield
    for p, mine in hooks.items():
        if p.requires_grad and p.grad is not None:
            for hook in mine.values():
                hook(p)


@contextmanager
def tensor_hooks_when_complete(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Calls what ``Tensor.register_hook`` registered once, at the end, with the step's gradient, which it may replace.

    Autograd would call it for each slice, with a part of the gradient. The gradients of an earlier step must be set
    aside. After a failure nothing is called.
    """
    with _tensor_hooks_set_aside(parameters) as hooks:
        yield
        ready = [p for p in hooks if p.requires_grad and p.grad is not None]
        gradients = [p.grad for p in ready]
        for p in ready:
            p.grad = None
            _set_tensor_hooks(p, hooks[p])
        if ready:  # by autograd itself, which checks what hooks return, and knows hooks for several parameters
            torch.autograd.backward(ready, gradients)
        for p in ready:
            hooks[p] = dict(p._backward_hooks or {})  # without those that removed themselves


@contextmanager
def _tensor_hooks_set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[dict[nn.Parameter, dict[int, Any]]]:
    every = {p: dict(p._backward_hooks) for p in parameters if p._backward_hooks}
    rest = {p: {key: hook for key, hook in all_.items() if isinstance(hook, GradientSum)} for p, all_ in every.items()}
    hooks: dict[nn.Parameter, dict[int, Any]] = {}
    for p, all_ in every.items():
        hooks[p] = {key: hook for key, hook in all_.items() if key not in rest[p]}
        _set_tensor_hooks(p, rest[p])
    try:
        yield hooks
    finally:
        for p, mine in hooks.items():
            together = {**rest[p], **(p._backward_hooks or {}), **mine}
            _set_tensor_hooks(p, dict(sorted(together.items())))  # in the order in which they were registered


def _set_tensor_hooks(parameter: nn.Parameter, hooks: Mapping[int, Any]) -> None:
    """In place: autograd, and the handles that remove hooks, refer to the dictionary."""
    registered = parameter._backward_hooks
    assert registered is not None
    registered.clear()
    registered.update(hooks)


@contextmanager
def _hooks_set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[dict[nn.Parameter, dict[int, Any]]]:
    hooks = {p: dict(p._post_accumulate_grad_hooks) for p in parameters if p._post_accumulate_grad_hooks}
    for p in hooks:
        p._post_accumulate_grad_hooks.clear()
    try:
        yield hooks
    finally:
        for p, mine in hooks.items():
            p._post_accumulate_grad_hooks.update(mine)  # in place: the handles that remove hooks refer to it


def match_layouts(parameters: Iterable[nn.Parameter]) -> None:
    """Gives gradients the layout of their parameters: with tokens shared out, those of norms are sums over devices.

    Args:
        parameters: of a stage whose backwards are through. Those that are no DTensors are left alone.
    """
    for p in parameters:
        if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)
        match_main_grad(p)


def _gradients(parameters: Iterable[nn.Parameter]) -> Iterator[Tensor]:
    """The sums of all trained parameters, zeros where there is none: the other replicas may have one."""
    for p in parameters:
        if p.requires_grad and is_half(p):
            if main_grad(p) is None:
                add_to_main_grad(p, torch.zeros_like(p))
            total = main_grad(p)
            assert total is not None
            yield to_local(total)
        elif p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            yield to_local(p.grad)


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups gradients of one dtype, in order, up to ``BUCKET`` bytes. All replicas must come to the same groups, so
    nothing but sizes and dtypes decides."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and (sum(g.nbytes for g in bucket) + gradient.nbytes > BUCKET or bucket[0].dtype != gradient.dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _refuse_quantized(stage: Stage) -> None:
    """FSDP2 would give layers a part of their whole numbers, without the scales of that part."""
    name = next((name for name, p in stage.named_parameters() if is_quantized(p)), None)
    if name is not None:
        raise ValueError(f"quantized weights cannot be sharded over replicas, got {name}; take shard=False")


class Sharded(Stage):
    """A stage of which every replica holds a part (FSDP2): gathered at a step's first slice, reduced after its last.

    In between the whole parameters and their gradients stay, however many slices there are.
    """

    def __init__(self, stage: Stage, mesh: DeviceMesh) -> None:
        super().__init__()
        _refuse_quantized(stage)
        self.stage, self.auxiliary_losses = stage, stage.auxiliary_losses
        # Gradients are summed over replicas in float32, as they are over slices, whatever the parameters are.
        self._half = any(is_half(p) for p in stage.parameters())
        self._gathered: set[nn.Parameter] = set()  # of which the gradients are summed in float32
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if self._half else None)
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        self._parts = [shard(block) for block in stage.blocks]
        self._parts.append(shard(self))
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # the loss is already divided by the number of all labels
            part.set_force_sum_reduction_for_comms(True)
        self._keep(True)

    def _keep(self, whole: bool) -> None:
        """Whether parameters and gradients stay whole at the end of a backward."""
        self._parts[-1].set_is_last_backward(not whole)
        self._parts[-1].set_requires_gradient_sync(not whole)
        self._parts[-1].set_reshard_after_backward(not whole)

    def forward(self, x: Tensor, cache: SliceCache | None) -> Tensor:
        if cache is None:
            return x * 1.0
        out: Tensor = self.stage(x, cache)
        if self._half:  # also without gradients: those of the head follow even if the layers are computed again later
            new = [p for p in self.stage.parameters() if p not in self._gathered]  # FSDP has parameters of its own
            sum_in_float32(new)
            self._gathered.update(new)
        return out

    def reduce(self) -> None:
        """FSDP reduces at the end of a backward. Weights' gradients may be put off beyond the last slice's; so this is
        a backward of its own, a dummy that triggers FSDP's reduction."""
        self._keep(False)
        device = next(self.parameters()).device
        self(torch.zeros(1, device=device, requires_grad=True), None).backward()
        self._keep(True)

    def release(self) -> None:
        """Lets go of what was gathered, after forwards only."""
        for part in self._parts:
            part.reshard()

    # The rest of a Stage

    @property
    def blocks(self) -> list[nn.Module]:
        return self.stage.blocks

    def make_cache(self, size: int, tokens: int) -> SliceCache:
        return self.stage.make_cache(size, tokens)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.stage.loss(hidden, labels)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.stage.logits(hidden)

    def before_head(self, hidden: Tensor) -> tuple[Tensor, nn.Module]:
        return self.stage.before_head(hidden)

    def hidden_shape(self, size: int, length: int) -> tuple[int, ...]:
        return self.stage.hidden_shape(size, length)


def total_norm(
    parameters: Iterable[nn.Parameter], tied: TiedWeights, norm_type: float, transport: Transport, wide: torch.dtype
) -> Tensor:
    """The norm of the gradients of all ranks, on every rank. What several ranks hold counts once.

    Args:
        parameters: those of this rank.
        tied: tells which of them are copies.
        norm_type: the p of the p-norm, or ``inf``.
        transport: to the other ranks.
        wide: the dtype of the norm.
    """
    skipped = {id(p) for p in tied.duplicates}
    counted = [p for p in parameters if p.grad is not None and id(p) not in skipped and _counts_here(p, transport)]
    # Without any gradients torch answers in its default precision.
    grads = [to_local(p.grad) for p in counted if p.grad is not None]
    norm = nn.utils.get_total_norm(grads, norm_type).to(transport.device, wide)
    if math.isinf(norm_type):
        return transport.all_reduce(norm, op=dist.ReduceOp.MAX)
    return transport.all_reduce(norm**norm_type) ** (1.0 / norm_type)


def _counts_here(parameter: nn.Parameter, transport: Transport) -> bool:
    """Whether this rank's part of a parameter counts in a norm over all ranks. Of ranks that hold the same values the
    first counts them; where each holds a part (a sharded DTensor), all do."""
    places = {DP: transport.dp_rank, TP: transport.tp_rank}
    roles = {name: role for role, name in transport.ranks.mesh_dims.items()}
    if isinstance(parameter, DTensor):
        for name, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if not placement.is_replicate():
                places.pop(roles[name])
    return not any(places.values())


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiplies all gradients by one number. The host does not wait for it.

    Args:
        parameters: whose gradients.
        factor: on the device.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_dtype.setdefault(p.grad.dtype, []).append(to_local(p.grad))
    for dtype, gradients in by_dtype.items():
        torch._foreach_mul_(gradients, factor.to(dtype))
