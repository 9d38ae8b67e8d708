"""Optional dependencies: imports them, or says how to install them."""

from importlib import import_module
from typing import Any


def import_extra(name: str, extra: str, user: object) -> Any:
    """A module that one of the extras brings; ``user`` is what needs it."""
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(f"{user} needs {name}, which is not installed; {install_line(extra)}") from None


def install_line(extra: str) -> str:
    """How to install an extra. Not by the name ``terapipe``: on the package index that may be somebody else's."""
    return f"in a clone of terapipe, pip install '.[{extra}]'"
