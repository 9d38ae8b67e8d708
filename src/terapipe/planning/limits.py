"""What numbers may be: the largest that make sense, and the one check of whole numbers."""

from numbers import Integral
from typing import Any

# Far beyond any model. A typing error above it is named at once, instead of a planner that does not come to an end.
LARGEST = {
    "layers": 10_000, "hidden": 2**20, "heads": 2**16, "vocab": 2**26, "max_seq_len": 2**27, "num_kv_heads": 2**16,
    "ffn_hidden": 2**24,
}  # fmt: skip


def check_whole_number(name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """Raises ValueError unless a value is a whole number within bounds. ``True`` is not 1: it is a mistaken argument.

    Args:
        name: What the message calls the value.
        value: The value. NumPy's integers count as whole numbers, because the solver computes with them.
        least: The smallest number allowed.
        most: The largest number allowed, or None.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if most is not None and int(value) > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
