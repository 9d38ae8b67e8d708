"""torch.compile for the layers of a stage.

What works on the state of a slice (attention, linear layers that put off their weights' gradients, states that are
carried on) changes things that compiled code may not know of. It stays outside: between two such calls a layer is
compiled, once for all layers of its kind and all lengths of slices.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from terapipe.modeling import attention
from terapipe.modeling.cache import SliceCache
from terapipe.modeling.stage import Stage

KINDS = 64  # of calls that code is compiled for: one sequence or more, one token or more, with gradients or without
TENSOR = "tp"  # the dimension of a mesh whose devices share operators

_compiled: WeakSet[nn.Module] = WeakSet()
_disable: Callable[[Any], Any] = torch.compiler.disable


def compile_layers(stage: nn.Module, *, backend: str = "inductor") -> None:
    """Compiles each of ``stage.blocks`` in place; code is made when it is first called, which takes a while.

    Modules inside a block whose forward takes a ``cache`` stay as they are, and so do ``attend`` and the cache's own
    methods. A stage may have ``compiled(forward)``, which gives what to call in place of a block's compiled forward.
    """
    _refuse(stage, backend)
    _keep_outside()
    around = getattr(stage, "compiled", lambda forward: forward)
    for block in cast(Stage, stage).blocks:
        if block in _compiled:
            continue
        _compiled.add(block)
        for module in block.modules():
            if module is not block and _takes_cache(module):
                module.forward = _disable(module.forward)
        # The forward alone, not the call: hooks of FSDP, or of a Hugging Face stage, are called as ever.
        block.forward = around(torch.compile(block.forward, dynamic=True, backend=backend))


def _refuse(stage: nn.Module, backend: str) -> None:
    parameters = list(stage.parameters())
    if any(isinstance(p, DTensor) and TENSOR in (p.device_mesh.mesh_dim_names or ()) for p in parameters):
        raise ValueError(
            "layers whose operators are split over devices cannot be compiled; take tensor 1, or leave compiling off"
        )
    if backend == "inductor" and any(p.device.type == "cpu" for p in parameters):
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ValueError(
                "compiling for a CPU needs a C++ compiler, and none was found; install g++, or leave compiling off"
            ) from None


@cache
def _keep_outside() -> None:
    """For the whole process, once; not when modules are imported, because torch takes seconds to load its compiler."""
    from torch import _dynamo
    from torch._dynamo.decorators import skip

    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, KINDS)
    skip(attention.attend)  # models know it by this name; what it calls, only attention.py knows
    attention._attend = _disable(attention._attend)
    for name in ("get_state", "set_state"):
        setattr(SliceCache, name, _disable(getattr(SliceCache, name)))


def _takes_cache(module: nn.Module) -> bool:
    return "cache" in inspect.signature(type(module).forward).parameters
