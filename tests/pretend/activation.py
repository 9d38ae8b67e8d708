"""Puts the pretend GPUs in place when torch is imported. Commands that do not import it are not slowed down."""

import ctypes
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from tests.pretend import build


def activate() -> None:
    """Before torch is imported: it asks for the hooks of CUDA only once."""
    if "torch" in sys.modules:
        raise RuntimeError("pretend GPUs must be activated before torch is imported")
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        sys.meta_path.insert(0, self)  # who asks for torch need not import it
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads the device before torch, and what torch lacks after it."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        for path in (build.torch_folder() / "lib" / "libtorch_cpu.so", build.library()):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        from tests.pretend import channel, cuda, cudnn, nccl, operators, waits

        for part in (cuda, waits, operators, cudnn, channel, nccl):
            part.install()
