"""Processes: start a function or a module on several ranks of this machine, and write jobs for clusters.

`processes` starts ranks, `loopback` lets them meet, `stopped` ends those that cannot end themselves; `forked` starts
many ranks that compute nothing, and `emulation` runs a plan on them; `job` only writes text.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from terapipe.launch.job import Launch

if TYPE_CHECKING:
    from terapipe.launch.emulation import EmulatedRun, emulate, emulated_pipeline, own_mebibytes
    from terapipe.launch.forked import ForkedRanks
    from terapipe.launch.processes import keep_memory, launch, take_cores

__all__ = [
    "EmulatedRun",
    "ForkedRanks",
    "Launch",
    "emulate",
    "emulated_pipeline",
    "keep_memory",
    "launch",
    "own_mebibytes",
    "take_cores",
]
_MODULES = {
    "emulation": ("EmulatedRun", "emulate", "emulated_pipeline", "own_mebibytes"),
    "forked": ("ForkedRanks",),
    "processes": ("keep_memory", "launch", "take_cores"),
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used: starting processes loads torch; describing a job does not."""
    if name not in __all__:
        raise AttributeError(f"module 'terapipe.launch' has no attribute {name!r}")
    module = next(module for module, names in _MODULES.items() if name in names)
    return getattr(import_module(f"terapipe.launch.{module}"), name)
