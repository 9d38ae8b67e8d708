"""Numbers for people: seconds and bytes with three digits and a unit, shares, counts."""

import math

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def seconds(value: float) -> str:
    """``0.0123`` is "12.3 ms"."""
    return _with_unit(value, _TIMES)


def memory(value: float) -> str:
    """``3 * 2**29`` is "1.5 GiB"."""
    return _with_unit(value, _SIZES)


def share(value: float) -> str:
    """``0.0834`` is "8.3%". Small shares keep one decimal, because idle time is often small."""
    return f"{value:.1%}" if abs(value) < 0.0995 and value else f"{value:.0%}"


def memory_unit(value: float) -> float:
    """The unit, in bytes, that ``memory`` uses for this number: the unit of an axis."""
    return next((size for size, _ in _SIZES if abs(value) >= size), 1.0)


def digits(value: float) -> str:
    """Three significant digits, never an exponent: 1234.5 is "1234", 0.01234 is "0.0123"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(number: int, noun: str) -> str:
    """``count(2, "slice")`` is "2 slices"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
    if value == 0:
        return "0"
    # 999.9 ms rounds to 1000 ms, so it is written as 1 s.
    size, name = next(((s, n) for s, n in units if abs(value) >= 0.9995 * s), units[-1])
    return f"{digits(value / size)} {name}"
