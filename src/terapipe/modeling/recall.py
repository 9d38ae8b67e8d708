"""Layers that are computed again without their products: what ``recompute="light"`` keeps of a layer.

The backward begins with the layer's forward, as ``block`` has it, but products are not computed: their outputs were
kept, and are recalled. So norms, activation functions, gates, rotary embeddings, dropout and casts are computed again,
and what they make, most of what autograd saves, is not kept. Of a Llama's layer::

    first forward    x   norm   q, k, v   rotary   attention   o            +   norm   gate, up     silu * up   down   +
    kept             x                    queries  output      output                  outputs
    second forward       norm   (NaN)     rotary   (recalled)  (recalled)   +   norm   (recalled)   silu * up

In brackets: nothing is computed. Outputs of q, k, v and down are not even kept, because nothing that autograd saves is
computed from them: attention saves queries, which the cache keeps. That differs from model to model (a norm of queries
saves its input), so it is not guessed but learned: a layer's first forward runs under ``_Lineage``, which sees every
operator and every tensor that autograd saves, and finds out from which products' outputs each of those was computed.
What no saved tensor needs is replaced by NaN: were it needed after all, gradients would be NaN and not slightly wrong.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from terapipe.modeling.offload import SavedTensors
from terapipe.modeling.weight_grads import to_local

NARROW = 8  # a product of so many times fewer inputs than outputs is computed again: its input is what is kept

ProductName = tuple[int, int]  # the weight's identity, and how often the layer has multiplied by it


@dataclass(frozen=True)
class LayerNeeds:
    """What the recomputation of a layer needs, as its first forward has shown. What that has not shown, it needs.

    Attributes:
        spared: Products of whose outputs no saved tensor is computed.
        changed: Products whose outputs the layer changes in place, which are therefore computed again.
        makes_queries: Attention layers whose queries are computed from outputs that are kept anyway.
    """

    spared: frozenset[ProductName]
    changed: frozenset[ProductName]
    makes_queries: frozenset[Hashable]


class _Output(NamedTuple):
    """Of a product in a layer's first forward.

    Attributes:
        tensor: The output, or what stands for it if the slice is offloaded. None if it is not needed.
        version: That of the output, which must not change.
        shape: Of the output.
        dtype: Of the output.
        device: Where it is.
    """

    tensor: Any
    version: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Recall:
    """What one forward of a layer leaves to the one that its backward begins with.

    Args:
        needs: Of the layer; None if this forward is to find out.
        saved: Has the tensors, if the slice is offloaded.
    """

    def __init__(self, needs: LayerNeeds | None, saved: SavedTensors | None) -> None:
        self.needs, self._saved = needs, saved
        self._outputs: dict[ProductName, _Output] = {}
        self._calls: Counter[int] = Counter()
        self._lineage: _Lineage | None = None

    def begin(self) -> Counter[int]:
        """Either forward of the layer begins: its products are counted from the first one.

        Returns:
            The counts so far, for ``resume``: ``torch.autograd.grad`` inside a layer computes the layer again while its
            first forward is under way.
        """
        calls, self._calls = self._calls, Counter()
        return calls

    def resume(self, calls: Counter[int]) -> None:
        """That forward is over, and the one that it interrupted goes on.

        Args:
            calls: What ``begin`` returned.
        """
        self._calls = calls

    def learn(self) -> AbstractContextManager[object]:
        """Around the first forward of a layer whose needs are not known: finds them out. Slow, but once for a layer."""
        self._lineage = _Lineage()
        return self._lineage

    def name_call(self, weight: Tensor) -> ProductName:
        """A name for the product that is about to be computed.

        Args:
            weight: Its weight.
        """
        number = self._calls[id(weight)]
        self._calls[id(weight)] = number + 1
        return id(weight), number

    def keep(self, name: ProductName, x: Tensor, out: Tensor) -> None:
        """Remembers a product of the first forward.

        Args:
            name: Of the product.
            x: Its input.
            out: Its output, which must be the same when it is recalled.
        """
        if self._lineage is not None:
            self._lineage.note_product(name, x, out)
            tensor = out.detach()  # until ``finish`` knows better
        elif self.needs is not None and (name in self.needs.spared or name in self.needs.changed):
            tensor = None
        else:
            tensor = self._pack(out.detach())
        self._outputs[name] = _Output(tensor, out._version, out.shape, out.dtype, out.device)

    def output(self, name: ProductName, *, last: bool) -> Tensor | None:
        """What a product of the first forward returned; NaN where nobody needs it.

        Args:
            name: Of the product.
            last: Whether it will not be asked for again.

        Returns:
            None if the product must be computed again.
        """
        out = self._outputs.pop(name) if last else self._outputs[name]
        if self.needs is None:  # torch.autograd.grad inside the layer's very first forward
            return out.tensor if out.tensor._version == out.version else None
        if name in self.needs.changed:
            return None
        if out.tensor is None:
            return torch.full(out.shape, torch.nan, dtype=out.dtype, device=out.device)
        if self._saved is not None:
            return self._saved.unpack(out.tensor)
        tensor: Tensor = out.tensor
        if tensor._version != out.version:
            raise RuntimeError(
                f"the output of a linear layer, of shape {tuple(tensor.shape)}, was changed in place in some slices "
                "only, but the layer's recomputation needs it; write out = out * 2 in place of out *= 2, or take "
                "recompute 'block' or 'none'"
            )
        return tensor

    def keeps_queries(self, layer: Hashable) -> bool:
        """Whether attention is to keep its queries, because they are not computed again.

        Args:
            layer: The attention layer's name.
        """
        return self.needs is None or layer not in self.needs.makes_queries

    def note_attention(self, layer: Hashable, q: Tensor, results: Iterable[Tensor]) -> None:
        """Attention is about to save queries and results, which the cache keeps.

        Args:
            layer: The attention layer's name.
            q: Queries as they are saved.
            results: Output and log-sum-exps.
        """
        if self._lineage is not None:
            self._lineage.note_attention(layer, q, results)

    def finish(self) -> LayerNeeds:
        """The first forward is over. Lets go of what is not needed, and returns the layer's needs."""
        if self._lineage is not None:
            changed = {name for name, out in self._outputs.items() if out.tensor._version != out.version}
            self.needs, self._lineage = self._lineage.needs(changed), None
            for name, out in self._outputs.items():
                lost = name in self.needs.spared or name in self.needs.changed
                self._outputs[name] = out._replace(tensor=None if lost else self._pack(out.tensor))
        assert self.needs is not None
        return self.needs

    def _pack(self, tensor: Tensor) -> Any:
        return tensor if self._saved is None else self._saved.pack(tensor)


_EMPTY = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty}
_DRAWN = {torch.ops.aten.native_dropout, torch.ops.aten.bernoulli_}  # masks do not depend on what is masked


class _Lineage(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds out from which products' outputs each tensor of a layer is computed. Inside, all operators pass through it.

    By storages: views and what is changed in place share them. What is written by other code than operators (kernels in
    triton, for one) was empty before, and may have been computed from anything.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._from: dict[int, frozenset[ProductName]] = {}  # by storage
        self._inputs: dict[ProductName, frozenset[ProductName]] = {}  # what a product's input is computed from
        self._queries: dict[Hashable, frozenset[ProductName]] = {}
        self._kept_queries: list[int] = []  # storages that attention is about to save
        self._needed: set[ProductName] = set()
        self._hooks: Any = None

    def __enter__(self) -> Any:
        """Also looks on while autograd saves tensors for torch.utils.checkpoint, whose hooks are the innermost."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def note(tensor: Tensor) -> Any:
            self._note_saved(tensor)
            return pack(tensor)

        self._hooks = saved_tensors_hooks(note, unpack)
        self._hooks.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(*arguments)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch calls this in the place of every operator."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that it takes itself apart, and what it does with its parts comes here
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = function(*args, **(kwargs or {}))
        origin = self._origin(inputs)
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        tags = function.tags
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            self._needed |= origin  # what follows may have another shape, or be another branch
        packet = function.overloadpacket
        if packet in _EMPTY:
            origin = frozenset(self._inputs)
        if function._schema.is_mutable:
            results += _changed_arguments(function._schema, args, kwargs or {})
        for x in results:
            is_mask = packet in _DRAWN and (packet is torch.ops.aten.bernoulli_ or x.dtype is torch.bool)
            self._set(x, frozenset() if is_mask else origin)
        return out

    def _origin(self, tensors: Iterable[Tensor]) -> frozenset[ProductName]:
        origin: frozenset[ProductName] = frozenset()
        for x in tensors:
            storage = _storage_of(x)
            origin |= frozenset(self._inputs) if storage is None else self._from.get(storage, frozenset())
        return origin

    def _set(self, x: Tensor, origin: frozenset[ProductName]) -> None:
        storage = _storage_of(x)
        if storage is not None:
            self._from[storage] = origin

    def note_product(self, name: ProductName, x: Tensor, out: Tensor) -> None:
        """As ``Recall.keep``: from here on, the output is where others come from."""
        self._inputs[name] = self._origin([x])
        self._set(out, frozenset({name}))

    def note_attention(self, layer: Hashable, q: Tensor, results: Iterable[Tensor]) -> None:
        """Notes from which products queries were computed. What attention returns is kept, so it comes from none."""
        self._queries[layer] = self._origin([q])
        storage = _storage_of(q)
        if storage is not None:
            self._kept_queries.append(storage)
        for x in results:
            self._set(x, frozenset())

    def _note_saved(self, tensor: Tensor) -> None:
        storage = _storage_of(tensor)
        if storage is not None and storage in self._kept_queries:
            self._kept_queries.remove(storage)  # once, by attention itself
        else:
            self._needed |= self._origin([tensor])

    def needs(self, changed: set[ProductName]) -> LayerNeeds:
        """Concludes what the layer's second forward needs.

        Args:
            changed: Products whose outputs were changed in place. They are computed again, from their inputs.
        """
        needed, todo = set(self._needed), list(self._needed)
        while todo:
            name = todo.pop()
            if name in changed:
                todo += self._inputs[name] - needed
                needed |= self._inputs[name]
        makes_queries = frozenset(layer for layer, origin in self._queries.items() if origin <= needed)
        return LayerNeeds(frozenset(self._inputs) - needed, frozenset(changed & needed), makes_queries)


def _changed_arguments(schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Lists the tensors among an operator's arguments that it writes to."""
    names = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    values = {each.name: value for each, value in zip(schema.arguments, args, strict=False)} | kwargs
    return [x for name in names for x in tree_leaves(values.get(name)) if isinstance(x, Tensor)]


def _storage_of(x: Tensor) -> int | None:
    """What identifies the memory of a tensor. None of classes that have theirs elsewhere."""
    x = to_local(x)
    if type(x).__name__ == "AsyncCollectiveTensor":  # of torch.distributed: a result that may be under way
        x = x.elem  # type: ignore[attr-defined]
    if type(x) not in (Tensor, torch.nn.Parameter, FakeTensor):
        return None
    identity: int = x.untyped_storage()._cdata
    return identity
