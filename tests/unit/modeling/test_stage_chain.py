"""All stages in one process, slice by slice, and how their results are compared."""

import pytest
import torch

import terapipe as tp
from terapipe.modeling.stage_chain import changed_buffers, first_line, relative_error, token_dim


def test_errors_are_relative_and_never_nan() -> None:
    wanted = torch.tensor([0.0, 4.0])
    assert relative_error(wanted, torch.tensor([1.0, 4.0])) == 0.25
    assert relative_error(wanted, torch.tensor([1.0, 4.0]), least=10.0) == pytest.approx(0.1)
    assert relative_error(wanted, torch.tensor([float("nan"), 4.0])) == float("inf")
    assert relative_error(wanted, torch.zeros(3)) == float("inf")
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_buffers_that_a_run_makes_or_changes_are_named() -> None:
    before = {"same": torch.ones(2), "mean": torch.zeros(2)}
    after = {"same": torch.ones(2), "mean": torch.ones(2), "new": torch.zeros(1)}
    assert changed_buffers(before, after) == ["mean", "new"]


def test_errors_that_nobody_was_meant_to_read_get_their_kind() -> None:
    assert first_line(ValueError("too long\nmore")) == "too long"
    assert first_line(KeyError("x")) == "its own code raises KeyError: 'x'"
    assert first_line(RuntimeError()) == "RuntimeError"
    assert len(first_line(ValueError("x" * 999))) == 160


def test_the_dimension_of_tokens_is_found_by_asking() -> None:
    model = tp.GPT(tp.PRESETS["gpt-tiny"])
    assert token_dim(model.stage(0, 1, torch.device("cpu")), 16) == 1  # not that of the 16 sequences
