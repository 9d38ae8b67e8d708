"""Linear layers and embeddings over slices: gradients of weights are added where they lie, now or later.

::

    autograd, per slice     grad_out^T x  ->  a new matrix  ->  .grad += matrix      the matrix moves three times
    here                    .grad += grad_out^T x                                    one product that adds
    deferred                [(grad_out, x), ...] of all slices, later                nobody waits for .grad

Autograd makes every slice's weight gradient as a matrix of its own and adds it to the sum; for a short slice, moving
those matrices costs as much as a tenth of the product itself. Here the product adds to the sum directly. And since
nobody waits for a weight's gradient, it may also be put off: then a slice's backward hands on its input's gradient
sooner, and what was deferred for one weight is added slice after slice while that weight's sum is at hand.

Under torch.autocast inputs, weights and biases are cast as autocast casts those of torch's own linear layers, and the
gradients of slices, each rounded to that dtype, are added up in the weight's own.

Of an embedding, autograd would make a whole table for every slice, zeros but for the rows of the slice's tokens. For a
vocabulary of 100,000 that takes longer than a layer. Here only those rows are touched.

Quantized weights of torchao are not trained. Autograd would keep the weight that a slice's forward made of each until
its backward, a float for each number of 8 bits and for each slice; ``project_quantized`` makes it again.

``fuse_weight_grads`` gives modules of a stage other classes, once. Inside of a slice (``with cache``) modules of these
classes work on it; outside they do what they did before. Parameters, names, hooks and ``state_dict`` stay as they are,
and copies and pickles are of the module's own class. Megatron has the same under the name gradient accumulation fusion.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from terapipe.modeling.quantized import is_composed, multiply_back, parts_of
from terapipe.modeling.recall import NARROW, ProductName
from terapipe.modeling.slice_cache import (
    SliceCache,
    SliceContext,
    autocast_dtype,
    cache_that_adds,
    cast_input,
    current_cache,
)
from terapipe.modeling.weight_grads import (
    HALF,
    DeferredGrad,
    add_rows,
    as_dtensor_like,
    call_hooks,
    gather_tokens,
    to_local,
)


def is_split_alike(x: Tensor, weight: Tensor) -> bool:
    """Whether both are split as torch's ColwiseParallel or RowwiseParallel split them: ``project`` knows no other.

    Args:
        x: The layer's input.
        weight: Its weight, (outputs, inputs).
    """
    if not (isinstance(x, DTensor) and isinstance(weight, DTensor)):
        return False
    inputs, weights = x.placements, weight.placements
    by_rows = weights == (Shard(1),) and inputs in ((Shard(x.ndim - 1),), (Shard(-1),))
    return by_rows or (weights == (Shard(0),) and (inputs == (Replicate(),) or _is_split_by_tokens(x)))


def _is_split_by_tokens(x: DTensor) -> bool:
    return x.ndim == 3 and x.placements == (Shard(1),)


def gathers_input(linear: nn.Module) -> bool:
    """Whether a linear layer, as it would be called now, takes an input of which each device has some tokens."""
    return isinstance(linear, _FusedLinear) and cache_that_adds(linear.weight) is not None


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: SliceCache,
    *,
    inputs_first: bool = False,
    adds_bias: bool = True,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """As ``F.linear``, with a weight whose gradient is added in place.

    The backward of a slice (``SliceCache.backward``) adds the weight's gradient to ``.grad``, or defers it, and then
    calls what ``register_post_accumulate_grad_hook`` registered. Any other backward, such as ``torch.autograd.grad``
    inside a layer, gets it from autograd.

    Args:
        x: (..., inputs). A DTensor where the weight is one.
        weight: (outputs, inputs), a leaf of autograd.
        bias: (outputs,), or None.
        cache: That of the slice being computed.
        inputs_first: Whether the weight is (inputs, outputs), as that of transformers' Conv1D.
        adds_bias: Otherwise the bias has its gradient only. For weights split by inputs, whose outputs are summed over
            devices: one device adds the bias.
    """
    if isinstance(x, DTensor):
        return _project_split(x, weight, bias, cache)
    dtype: torch.dtype | None = None
    keeper: list[Any] | None = None
    if torch.is_autocast_enabled(x.device.type):
        dtype, x, bias = autocast_dtype(weight), cast_input(x), None if bias is None else cast_input(bias)
    if cache.current.checkpointed and x.requires_grad and weight.requires_grad:
        keeper = []
        x = _Keep.apply(x, keeper)  # type: ignore[no-untyped-call]
    x = torch._C._functorch.unwrap_if_dead(x)
    recall, name, recalled = cache.current.recall, None, None
    if recall is not None and not _is_narrow(weight, inputs_first):
        name, recalled = _recall(cache.current, weight)
    out: Tensor = _apply_project(x, weight, bias, cache, dtype, inputs_first, adds_bias, keeper, mesh, [recalled])
    if recall is not None and name is not None and cache.current.checkpointed == "first":
        recall.keep(name, x, out)
    return out


def _recall(context: SliceContext, weight: Tensor) -> tuple[ProductName, Tensor | None]:
    """Names a product of a layer that recalls; with its output, if it was computed before."""
    assert context.recall is not None
    name = context.recall.name_call(weight)
    again = context.checkpointed == "again"
    return name, context.recall.output(name, last=context.is_own_backward) if again else None


def _is_narrow(weight: Tensor, inputs_first: bool) -> bool:
    """Whether a product is computed again rather than recalled, because its input is so much smaller: adapters' second
    matrix, whose output only adds to that of the first."""
    outputs, inputs = weight.shape[::-1] if inputs_first else weight.shape
    return inputs * NARROW <= outputs


def _project_split(x: DTensor, weight: Tensor, bias: Tensor | None, cache: SliceCache) -> DTensor:
    """As ``project``, for weights that are split over devices::

    weight by outputs (Shard(0))    x whole       ->  some of the outputs; the gradient of x is a sum over devices
    weight by inputs  (Shard(1))    some of x     ->  outputs are sums over devices; the bias is added on one
    """
    assert isinstance(weight, DTensor)
    mesh, bias = weight.device_mesh, None if bias is None else to_local(bias)
    if weight.placements == (Shard(1),):  # the outputs are sums over devices, to which one of them adds the bias
        out = project(x.to_local(), weight, bias, cache, adds_bias=mesh.get_local_rank() == 0)
        return DTensor.from_local(out, mesh, [Partial()], run_check=False)
    # Each device has some of the outputs, and knows their part of the input's gradient.
    if _is_split_by_tokens(x):
        out = project(x.to_local(), weight, bias, cache, mesh=mesh)
    else:
        out = project(x.to_local(grad_placements=[Partial()]), weight, bias, cache)
    shape = torch.Size((*out.shape[:-1], weight.shape[0]))  # devices may have unequal parts, of a vocabulary for one
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


class _Keep(torch.autograd.Function):
    """Saves the input of a product before it is computed.

    torch.utils.checkpoint computes a layer again until the last saved tensor is there. Had ``_Project`` saved its own
    input, the last product of a layer would be computed again, only to be thrown away: nobody needs its output.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keeper: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        keeper.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Project(torch.autograd.Function):
    """The product of ``project``.

    Its backward adds the weight's gradient in place only where that is what its caller wants: in the backward of the
    slice. Elsewhere it returns it, and may itself be differentiated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cache: SliceCache,
        dtype: torch.dtype | None,  # what autocast casts the weight to, if it does
        inputs_first: bool,
        adds_bias: bool,
        keeper: list[Any] | None,  # holds the context of _Keep, which saved the input
        mesh: DeviceMesh | None,  # among whose devices the input's tokens are shared out
        recalled: list[Tensor | None],  # the output, if it was computed before
    ) -> Tensor:
        if keeper is None and ctx.needs_input_grad[1]:
            ctx.save_for_backward(x)
        if mesh is not None and recalled[0] is None:
            x = gather_tokens(x, mesh)
        # Not saved by autograd: where that computes what was saved again, it gives another tensor than the parameter.
        # A cast of a weight that is not trained is not kept for the step: there may be many, as below adapters.
        is_kept = ctx.needs_input_grad[1] or dtype is None
        local = weight if dtype is None else cache.cast(weight, dtype) if is_kept else to_local(weight).to(dtype)
        local = to_local(local) if type(local) is DTensor else local
        local = local.t() if inputs_first else local
        ctx.of_forward = weight, local if is_kept else None, cache, dtype, inputs_first, keeper, mesh
        ctx.version = weight._version if ctx.needs_input_grad[0] else None
        if recalled[0] is not None:
            return recalled[0]
        # Of F.linear the output would be a view, which models may not change in place behind a Function.
        out = x.new_empty(*x.shape[:-1], local.shape[0])
        rows, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if bias is not None and adds_bias:
            torch.addmm(bias, rows, local.t(), out=flat)
        else:
            torch.mm(rows, local.t(), out=flat)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias, of which that of the weight is None if it was added in place or deferred.

        The weight is not saved by autograd, so this compares its version, as autograd would: a weight that was changed
        since the forward would give a wrong gradient of x.
        """
        weight, local, cache, dtype, inputs_first, keeper, mesh = ctx.of_forward
        want_x, want_weight, want_bias = ctx.needs_input_grad[:3]
        if want_x and weight._version != ctx.version:
            raise changed_weight("a weight", weight, ctx.version)
        rows, returned = grad.reshape(-1, grad.shape[-1]), None
        if torch.is_grad_enabled() or local is None:  # somebody will differentiate this: by the weight, too
            local = to_local(weight) if dtype is None else to_local(weight).to(dtype)
            local = local.t() if inputs_first else local
        current, grad_x = cache.current, None
        if want_weight:
            (x,) = ctx.saved_tensors if keeper is None else keeper[0].saved_tensors
            inputs = x.reshape(-1, x.shape[-1]) if mesh is None else x
            left, right = (inputs, rows) if inputs_first else (rows, inputs)
            deferred = DeferredGrad(weight, left, right, current.main_grads and weight.dtype in HALF, mesh)
            if mesh is not None and not current.defer:
                deferred = deferred.gather()
                grad_x = _scatter(grad @ local, mesh) if want_x else None  # while tokens are gathered
            # Whether this backward is the slice's own, as ``is_own_backward`` says, without one more call.
            if torch._C._current_graph_task_id() != current.own_task or weight._backward_hooks:
                returned = as_dtensor_like(weight, deferred.product().to(weight.dtype))
            elif current.defer:
                current.deferred.append(deferred)
            else:
                deferred.add()
        if want_x and grad_x is None:
            grad_x = grad @ local if mesh is None else _scatter(grad @ local, mesh)
        return grad_x, returned, rows.sum(0) if want_bias else None, *[None] * 7


def _scatter(grad: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sums an input's gradient over devices; each gets that of its tokens."""
    total = DTensor.from_local(grad, mesh, [Partial()], run_check=False)
    return total.redistribute(placements=[Shard(1)]).to_local()


# In C alone. ``Function.apply`` prepares for transforms of torch.func, which ``cache_that_adds`` leaves to autograd:
# eight calls in Python for every product of every slice.
_apply_project: Any = super(torch.autograd.Function, _Project).apply


def changed_weight(name: str, weight: Tensor, version: int) -> RuntimeError:
    """Makes the error that autograd would raise for a saved tensor that was changed in place.

    Args:
        name: What it is, for the message.
        weight: As it is now.
        version: The weight's ``_version`` in the forward.
    """
    return RuntimeError(
        f"{name} of shape {tuple(weight.shape)}, which a slice's backward needs, has been modified by an inplace "
        f"operation since the slice's forward: it is at version {weight._version}, expected version {version}; change "
        "weights between steps only, and in no layer's forward"
    )


# Quantized weights of torchao


def project_quantized(x: Tensor, weight: Tensor, bias: Tensor | None, cache: SliceCache) -> Tensor:
    """As ``F.linear`` with a frozen weight of torchao, of which nothing is kept for the backward.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs).
        bias: (outputs,), or None.
        cache: That of the slice being computed.
    """
    recall, name, recalled = cache.current.recall, None, None
    if recall is not None and not _is_narrow(weight, inputs_first=False):
        name, recalled = _recall(cache.current, weight)
    out: Tensor = _ProjectQuantized.apply(x, [weight], bias, [recalled])  # type: ignore[no-untyped-call]
    if recall is not None and name is not None and cache.current.checkpointed == "first":
        recall.keep(name, x, out)
    return out


class _ProjectQuantized(torch.autograd.Function):
    """The product of ``project_quantized``. Its forward is torchao's own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: list[Tensor],  # the weight, which autograd need not see
        bias: Tensor | None,
        recalled: list[Tensor | None],  # the output, if it was computed before
    ) -> Tensor:
        (weight,) = weights
        dtype = autocast_dtype(x) or x.dtype
        ctx.of_forward = weight, dtype, x.dtype, None if bias is None else bias.dtype
        ctx.versions = [part._version for part in parts_of(weight)]
        if recalled[0] is not None:
            return recalled[0]
        # Otherwise autograd would take the output for a view, which models may then not change in place.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, dtype, x_dtype, bias_dtype = ctx.of_forward
        for part, version in zip(parts_of(weight), ctx.versions, strict=True):
            if part._version != version:
                raise changed_weight("a part of a quantized weight", part, version)
        grad_x = multiply_back(grad, weight, dtype).to(x_dtype) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0).to(bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None


# Embeddings


NO_PADDING = -1  # what torch takes for it


def embed(ids: Tensor, weight: Tensor, padding: int | None, cache: SliceCache) -> Tensor:
    """As ``F.embedding``, with a table whose gradient is added in place.

    The backward of a slice adds to some rows of ``.grad``; any other backward gets the gradient from autograd.

    Args:
        ids: Of any shape.
        weight: (vocabulary, width), a leaf of autograd.
        padding: The row that gets no gradient, or None.
        cache: That of the slice being computed.
    """
    if isinstance(weight, DTensor):
        return _embed_split(to_local(ids), weight, padding, cache)
    out: Tensor = _apply_embed(ids, weight, NO_PADDING if padding is None else padding, cache)
    return out


def _embed_split(ids: Tensor, weight: DTensor, padding: int | None, cache: SliceCache) -> DTensor:
    """Each device has some rows of the table, and zeros for the tokens of others: the embedding is the sum over
    devices::

        ids                            7      2      9
        device 0, rows 0 to 4          0     row 2   0
        device 1, rows 5 to 9        row 7    0    row 9
    """
    mesh, rows = weight.device_mesh, weight.to_local().shape[0]
    if weight.placements == (Replicate(),):  # every device has the whole table, and does the same
        whole: Tensor = _apply_embed(ids, weight, NO_PADDING if padding is None else padding, cache)
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    first = min(mesh.get_local_rank() * -(-weight.shape[0] // mesh.size()), weight.shape[0])  # as torch cuts it
    elsewhere = (ids < first) | (ids >= first + rows)
    own_padding = NO_PADDING if padding is None or not first <= padding < first + rows else padding - first
    out: Tensor = _apply_embed((ids - first).masked_fill(elsewhere, 0), weight, own_padding, cache)
    out = out.masked_fill(elsewhere[..., None], 0.0)
    return DTensor.from_local(out, mesh, [Partial()], run_check=False)


class _Embed(torch.autograd.Function):
    """The lookup of ``embed``; see ``_Project`` for which backward adds in place."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, cache: SliceCache) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.of_forward = weight, padding, cache
        return F.embedding(ids, to_local(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        weight, padding, cache = ctx.of_forward
        if not weight.requires_grad:  # frozen since the forward: autograd adds nothing then
            return None, None, None, None
        if cache.current.is_own_backward and not weight._backward_hooks:
            _add(
                weight, ids.flatten(), grad.reshape(-1, grad.shape[-1]), padding, to_main_grad=cache.current.main_grads
            )
            return None, None, None, None
        return None, _table(grad, ids, weight, padding), None, None


_apply_embed: Any = super(torch.autograd.Function, _Embed).apply  # as _apply_project


def _table(grad: Tensor, ids: Tensor, weight: Tensor, padding: int) -> Tensor:
    """The gradient of the whole table, as autograd makes it: zeros but for the rows of the ids."""
    rows = to_local(weight).shape[0]
    table: Tensor = torch.ops.aten.embedding_dense_backward(grad, ids, rows, padding, False)
    return as_dtensor_like(weight, table)


@torch.no_grad()
def _add(weight: Tensor, ids: Tensor, rows: Tensor, padding: int, *, to_main_grad: bool) -> None:
    """Adds rows to the table's gradient.

    Args:
        weight: The table.
        ids: Numbers of rows, one for each token.
        rows: Gradients of the outputs, one for each token.
        padding: The row that gets no gradient, or ``NO_PADDING``.
        to_main_grad: Whether sums of half-precision tables are ``main_grad``.
    """
    if padding != NO_PADDING:
        rows = rows.masked_fill((ids == padding)[:, None], 0.0)
    if to_main_grad and weight.dtype in HALF:
        add_rows(weight, ids, rows)
        return
    if weight.grad is None:
        weight.grad = _table(rows, ids, weight, NO_PADDING)
    else:
        to_local(weight.grad).index_add_(0, ids, rows)
    call_hooks(weight)


# Modules


_KEEPS_CLASS = "_keeps_class"


def fuse_weight_grads(stage: nn.Module) -> None:
    """Gives linear layers and embeddings of a stage classes whose gradients are added in place.

    Modules of ``nn.Linear``, transformers' ``Conv1D`` and ``nn.Embedding`` are meant, and subclasses of embeddings.
    Subclasses of linear layers may compute something else, and are left alone. Linear layers whose weight torchao
    quantized get a class that keeps no copy of it. Parameters, names, hooks and
    ``state_dict`` stay as they are.

    Args:
        stage: Changed in place; calling it twice changes nothing.
    """
    for module in stage.modules():
        kind = _fused_class(type(module))
        if kind is _FusedLinear and is_composed(module.weight):  # type: ignore[arg-type]
            kind = _QuantizedLinear
        if kind is not None and _KEEPS_CLASS not in vars(module):
            # Not by nn.Module's own __setattr__, which looks for parameters.
            object.__setattr__(module, "__class__", kind)


def keep_plain(modules: Iterable[nn.Module]) -> None:
    """Gives modules the classes that they had before, for good. For compiled layers, see compiling.py.

    Args:
        modules: Any; those that were not changed stay as they are.
    """
    for module in modules:
        object.__setattr__(module, "__class__", plain_class(module))
        vars(module)[_KEEPS_CLASS] = True


def has_plain_products(stage: nn.Module) -> bool:
    """Whether some linear layers make gradients as autograd does, for good: those of compiled layers.

    Args:
        stage: One that ``fuse_weight_grads`` has seen.
    """
    return any(_KEEPS_CLASS in vars(m) and _fused_class(type(m)) is not None for m in stage.modules())


def plain_class(module: nn.Module) -> type[nn.Module]:
    """A module's class without what ``fuse_weight_grads`` did."""
    return _plain.get(type(module), type(module))


class _Fused(nn.Module):
    """What the classes here have in common: copies, pickles and printed names are those of the module's own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(1)  # later protocols compare the class with the module's
        create, (kind, *rest), *state = reduced
        return create, (_plain.get(kind, kind), *rest), *state

    def _get_name(self) -> str:
        return plain_class(self).__name__


class _FusedLinear(_Fused, nn.Linear):
    """``nn.Linear`` whose weight's gradient is added in place inside of a slice."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        cache = cache_that_adds(weight, is_product=True)
        is_split = isinstance(x, DTensor) or isinstance(weight, DTensor)
        if cache is None or (is_split and not is_split_alike(x, weight)):
            return super().forward(x)
        return project(x, weight, self.bias, cache)


class _QuantizedLinear(_Fused, nn.Linear):
    """``nn.Linear`` whose weight torchao quantized."""

    def forward(self, x: Tensor) -> Tensor:
        cache, weight = current_cache(), self.weight
        if cache is None or not (torch.is_grad_enabled() and cache.current.fuses and is_composed(weight)):
            return super().forward(x)
        if torch._C._are_functorch_transforms_active():
            return super().forward(x)
        return project_quantized(x, weight, self.bias, cache)


class _FusedConv1D(_Fused):
    """Of transformers, for GPT-2: a linear layer whose weight is (inputs, outputs)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        cache = cache_that_adds(self.weight, is_product=True)
        if cache is None or isinstance(x, DTensor) or isinstance(self.weight, DTensor):
            plain: Tensor = super().forward(x)
            return plain
        return project(x, self.weight, self.bias, cache, inputs_first=True)


class _FusedEmbedding(_Fused, nn.Embedding):
    """``nn.Embedding`` likewise; also below a subclass that calls ``super().forward``, as those do that scale
    embeddings."""

    def forward(self, ids: Tensor) -> Tensor:
        cache = cache_that_adds(self.weight)
        special = self.max_norm is not None or self.scale_grad_by_freq or self.sparse  # more than a sum of rows
        if cache is None or special or not _has_own_rows(self.weight):
            return super().forward(ids)
        return embed(ids, self.weight, self.padding_idx, cache)


def _has_own_rows(table: Tensor) -> bool:
    """Whether this device has the whole table, or some of its rows as torch's RowwiseParallel gives them out."""
    if not isinstance(table, DTensor):
        return True
    return table.placements in ((Shard(0),), (Replicate(),)) and table.to_local().shape[0] > 0


_fused: dict[type[nn.Module], type[nn.Module] | None] = {nn.Linear: _FusedLinear, nn.Embedding: _FusedEmbedding}
_plain: dict[type[nn.Module], type[nn.Module]] = {
    _FusedLinear: nn.Linear,
    _QuantizedLinear: nn.Linear,
    _FusedEmbedding: nn.Embedding,
}


def _fused_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Finds or makes the class that modules of a class get; None if they keep their own."""
    if kind not in _fused:
        _fused[kind] = None
        if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
            _fused[kind] = type("Conv1D", (_FusedConv1D, kind), {})
        elif issubclass(kind, nn.Embedding) and not issubclass(kind, _Fused):
            _fused[kind] = type(kind.__name__, (kind, _FusedEmbedding), {})
        fused = _fused[kind]
        if fused is not None:
            _plain[fused] = kind
    return _fused[kind]
