"""Optional dependencies: imports them, or says how to install them.

An extra is a group of packages in pyproject.toml that some feature needs and most users do not: ``hf``, ``png``, ...
"""

from importlib import import_module
from typing import Any


def import_extra(name: str, extra: str, user: object) -> Any:
    """Imports a module that one of the extras brings. Raises ValueError, with the line to install it, if it is not
    there.

    Args:
        name: Of the module.
        extra: Of the extra that brings it.
        user: What needs it, the subject of the message.
    """
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(f"{user} needs {name}, which is not installed; {install_line(extra)}") from None


def install_line(extra: str) -> str:
    """How to install an extra. Not by the name ``terapipe``: on the package index that may be somebody else's.

    Args:
        extra: Its name.
    """
    return f"in a clone of terapipe, pip install '.[{extra}]'"
