"""What a small copy is compared with: lengths of its slices, and how far it may be off."""

import pytest
import torch

from terapipe.hf.verify.reference import errors, uneven_lengths
from terapipe.hf.verify.verification import BOUND


@pytest.mark.parametrize(("slices", "shortest"), [(1, 1), (2, 1), (4, 1), (4, 2), (7, 2), (14, 1)])
def test_slices_of_a_check_are_uneven(slices: int, shortest: int) -> None:
    found = uneven_lengths(slices, shortest)
    assert len(found) == slices
    assert sum(found) == 29
    assert min(found) >= shortest
    assert slices == 1 or len(set(found)) > 1


def test_errors_are_relative_to_the_largest_gradient_of_all() -> None:
    """A gradient that is zero but for rounding is no fault; one that is missing, or not a number, is."""
    wanted = 1.0, {"a.0.x": torch.ones(3), "b": torch.zeros(2)}
    found = 1.0, {"a.0.x": torch.ones(3), "b": torch.full((2,), 1e-17)}
    assert max(errors(wanted, found).values()) < BOUND
    for broken in ({"b": torch.zeros(2)}, {"a.0.x": torch.full((3,), torch.nan), "b": torch.zeros(2)}):
        assert errors(wanted, (1.0, broken))["a.*.x"] == float("inf")
    assert errors(wanted, (float("nan"), found[1]))["loss"] == float("inf")
    assert errors(wanted, (1.0, {**found[1], "c": torch.ones(1)}))["c"] == float("inf")
