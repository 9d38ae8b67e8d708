"""Training runs: data, optimizer, checkpoints, logging, the loop. README.md says which file to read first.

Its public names are loaded when first used, so that importing `terapipe.training.config` does not load torch: `terapipe
train --help` and `--print-config` answer at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terapipe.training.checkpoint_folder import folder_of, path_of, steps
    from terapipe.training.logging.metrics import read as read_metrics
    from terapipe.training.run import Run, run_rank

__all__ = ["Run", "folder_of", "path_of", "read_metrics", "run_rank", "steps"]

_MODULES = {"Run": "run", "run_rank": "run", "read_metrics": "logging.metrics"}


def __getattr__(name: str) -> Any:
    """Imports a public name from its module."""
    if name not in __all__:
        raise AttributeError(f"module 'terapipe.training' has no attribute {name!r}")
    module = import_module(f"terapipe.training.{_MODULES.get(name, 'checkpoint_folder')}")
    return getattr(module, "read" if name == "read_metrics" else name)
