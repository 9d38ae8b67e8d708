"""``python -m tests.pretend [--gpus N] PYTEST ARGUMENTS``, or after ``--`` any command, on pretend GPUs.

Without names of tests, those of tests/gpu/selection.py. After ``--``, arguments that begin with a dash or name a script
are python's: ``-- -m terapipe doctor``.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from tests.gpu.selection import FILES
from tests.pretend import GPUS, build

SITE = Path(__file__).with_name("site")
ROOT = Path(__file__).parents[2]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pretend", description=__doc__)
    parser.add_argument("--gpus", type=int, default=8, help="how many (default: 8)")
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, pytest = parser.parse_known_args(arguments[:at])
    if not any(argument and Path(argument.partition("::")[0]).exists() for argument in pytest):
        pytest += FILES
    command = arguments[at + 1 :] or ["-m", "pytest", *pytest]
    try:
        build.library()
    except build.CannotBuildError as error:
        _skip(command, error)
    if command[0].startswith("-") or command[0].endswith(".py"):
        command = [sys.executable, *command]
    os.execvpe(command[0], command, environment(options.gpus))


def _skip(command: list[str], error: Exception) -> NoReturn:
    """Tests are skipped without harm; whoever wants a command to run must know that it did not."""
    if command[:2] == ["-m", "pytest"]:
        print(f"skipped: {error}")
        sys.exit(0)
    sys.exit(f"there are no pretend GPUs here: {error}")


def environment(gpus: int) -> dict[str, str]:
    """Of a process with pretend GPUs, and of all that it starts."""
    paths = [str(SITE), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, GPUS: str(gpus), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


if __name__ == "__main__":
    main(sys.argv[1:])
