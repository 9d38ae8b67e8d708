"""The interpreter that rivals run under: this one's packages, and DeepSpeed, which is no dependency of the project."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-rivals"
PACKAGE = "deepspeed>=0.19,<0.20"
SETTINGS = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}  # no kernels are compiled, and no GPU is looked for


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def why_not() -> str | None:
    """Makes the environment if it is not there. Returns why it cannot be had, or None.

    A line in a .pth file lets it see the packages of this interpreter: both sides run the same torch, and none is
    downloaded again.
    """
    python = FOLDER / "bin" / "python"
    asks = [str(python), "-c", "import deepspeed"]
    if python.exists() and not subprocess.run(asks, capture_output=True, env=_environment()).returncode:
        return None
    print(f"making {FOLDER.name}, once: some minutes", file=sys.stderr)
    try:
        _run(sys.executable, "-m", "venv", "--clear", str(FOLDER))
        inside = _run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        Path(inside, "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _run(str(python), "-m", "pip", "install", PACKAGE)
        _run(*asks)
    except (OSError, RuntimeError) as error:
        return f"{PACKAGE} cannot be had: {error}"
    return None


def run_there() -> NoReturn:
    """This program again, by the interpreter that has DeepSpeed, in the place of this process."""
    python = str(FOLDER / "bin" / "python")
    os.execve(python, [python, "-m", "benchmarks.rivals", *sys.argv[1:]], _environment())


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(paths)}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"{command[0]} ended with {done.returncode}")
    return done.stdout
