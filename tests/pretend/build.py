"""Compiles the pretend device, once for each version of torch, of python, and of the source. Does not import torch."""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TORCH = "2.13.0"  # whose private headers and ABI the source is written for
SOURCE = Path(__file__).with_name("device.cpp")
CACHE = Path(__file__).parents[2] / "build" / "pretend"


class CannotBuildError(Exception):
    """Why there can be no pretend device here."""


def library() -> Path:
    """The compiled device, built now unless it was before."""
    _check_torch()
    target = CACHE / f"{_key()}.so"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with open(CACHE / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process compiles, the others wait for it
            if not target.exists():
                _compile(target)
    return target


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuildError("torch is not installed")
    return Path(spec.origin).parent


def _check_torch() -> None:
    try:
        version, _, kind = importlib.metadata.version("torch").partition("+")
    except importlib.metadata.PackageNotFoundError:
        raise CannotBuildError("torch is not installed") from None
    if version != TORCH:
        raise CannotBuildError(f"the pretend GPU is written for torch {TORCH}, and {version} is installed")
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuildError(f"torch {version}+{kind} has CUDA of its own")
    if sys.platform != "linux":
        raise CannotBuildError(f"the pretend GPU is written for Linux, and this is {sys.platform}")


def _key() -> str:
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    return f"device-{importlib.metadata.version('torch')}-{platform.machine()}-{source}"


def _compile(target: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotBuildError("there is no C++ compiler: g++ is not installed, and CXX names no other")
    torch = torch_folder()
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        made = Path(folder) / "device.so"
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(made)]
        command += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        command += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise CannotBuildError(f"{' '.join(command)} failed:\n{result.stderr}")
        made.replace(target)
