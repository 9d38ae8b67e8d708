"""How numbers read."""

import pytest

from terapipe.reporting.style import count, digits, memory, seconds, share


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12.0, "12 s"),
        (1234.5, "1234 s"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (0.9989, "999 ms"),
        (2.5e-6, "2.5 µs"),
        (3e-10, "0.3 ns"),
        (-0.002, "-2 ms"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1000, "1000 B"),
        (2**30, "1 GiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**30 - 1, "1 GiB"),
        (80 * 2**30, "80 GiB"),
    ],
)
def test_memory_is_binary(value: int, text: str) -> None:
    assert memory(value) == text


def test_shares_and_digits() -> None:
    assert [share(x) for x in (0.0, 0.034, 0.25, 1.0)] == ["0%", "3.4%", "25%", "100%"]
    assert [digits(x) for x in (0.9041, 1.0, 1e6, 0.00012345)] == ["0.904", "1", "1000000", "0.000123"]


def test_counts() -> None:
    assert [count(n, "slice") for n in (0, 1, 2)] == ["0 slices", "1 slice", "2 slices"]
