"""torch.compile for the layers of a stage.

What works on the state of a slice (attention, states that are carried on) changes things that compiled code may not
know of. It stays outside: between two such calls a layer is compiled, once for all layers of its kind and all lengths
of slices.

Linear layers inside compiled code make gradients of their weights as autograd does: a matrix for each slice, which is
added to the sum, and which no order can put off. Compiled code does not know whose gradient it makes: torch's compiler
detaches parameters to which a backward returns nothing. And products that stay outside, between pieces of compiled
code, cost more than they gain (a Llama with 16 slices on a CPU took 1.07 times as long as without compiling; with its
products inside 0.97 times). ``SlicedStage.defers_weight_grads`` says so.
"""

import inspect
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from terapipe.modeling import attention
from terapipe.modeling.linear import keep_plain
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import Stage

KINDS = 64  # of calls that code is compiled for: one sequence or more, one token or more, with gradients or without

_disable: Callable[[Any], Any] = torch.compiler.disable


def compile_layers(stage: Stage, *, backend: str = "inductor") -> None:
    """Compiles each of ``stage.blocks`` in place; code is made when it is first called, which takes a while.

    Modules inside a block whose forward takes a ``cache`` stay as they are, and so do ``attend`` and the cache's own
    methods::

        block.forward    norm, q, k, v    | attend |    out, norm, MLP
                         compiled           eager       compiled          two pieces of code, shared by all blocks

    Args:
        stage: ``stage.wrap_compiled`` may put something around a block's compiled forward, or refuse.
        backend: That of ``torch.compile``.
    """
    _refuse(stage, backend)
    _keep_outside()
    for block in stage.blocks:
        if getattr(block.forward, "_compiled_layer", False):
            continue
        outside = {module for module in block.modules() if module is not block and _takes_cache(module)}
        for module in outside:
            module.forward = _disable(module.forward)
        eager = {inner for module in outside for inner in module.modules()}
        keep_plain(module for module in block.modules() if module not in eager)
        # The forward alone, not the call: hooks of FSDP, or of a Hugging Face stage, are called as ever.
        compiled: Any = stage.wrap_compiled(torch.compile(block.forward, dynamic=True, backend=backend))
        compiled._compiled_layer = True
        block.forward = compiled


def _refuse(stage: Stage, backend: str) -> None:
    """What would fail in the first step, on one rank after the other, is refused here, with what to install or leave
    off."""
    parameters = list(stage.parameters())
    if any(_is_tensor_parallel(block) for block in stage.blocks):
        raise ValueError(
            "layers whose operators are split over devices cannot be compiled; take tp 1, or leave compiling off"
        )
    if backend == "inductor" and any(p.device.type == "cuda" for p in parameters):
        _refuse_without_triton()
    if backend == "inductor" and any(p.device.type == "cpu" for p in parameters):
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ValueError(
                "compiling for a CPU needs a C++ compiler, and none was found; install g++, or leave compiling off"
            ) from None


def _refuse_without_triton() -> None:
    """triton compiles its launcher with a C compiler when it first runs: without one it fails in the first step."""
    from torch.utils._triton import has_triton

    if not has_triton():
        raise ValueError("compiling for a GPU needs triton, and none was found; install it, or leave compiling off")
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        raise ValueError(
            "compiling for a GPU needs a C compiler for triton's launcher, and none was found; install gcc, or leave "
            "compiling off"
        )


def _is_tensor_parallel(block: nn.Module) -> bool:
    """A block's parameters may also be DTensors because FSDP2 shards it, over one dimension of the mesh."""
    sharded = any(kind.__name__ == "FSDPModule" for kind in type(block).__mro__)
    return any(isinstance(p, DTensor) and (p.device_mesh.ndim > 1 or not sharded) for p in block.parameters())


@cache
def _keep_outside() -> None:
    """For the whole process, once: models call ``attend`` and the cache's methods by their names in these modules,
    which know of no stage. Not when modules are imported, because torch takes seconds to load its compiler."""
    from torch import _dynamo
    from torch._dynamo.decorators import skip

    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, KINDS)
    skip(attention.attend)  # models know it by this name; what it calls, only attention.py knows
    attention._attend = _disable(attention._attend)
    for name in ("get_state", "set_state"):
        setattr(SliceCache, name, _disable(getattr(SliceCache, name)))


def _takes_cache(module: nn.Module) -> bool:
    """Whether a module works on the slice's state itself: such a module is called outside of compiled code."""
    return "cache" in inspect.signature(type(module).forward).parameters
