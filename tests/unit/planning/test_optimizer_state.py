"""Bytes of optimizers' states, and plans that count them."""

import pytest

import terapipe
from terapipe.planning.optimizer_state import OPTIMIZERS, state_bytes
from terapipe.search.result import PlanResult


@pytest.mark.parametrize(
    ("optimizer", "half", "single"),
    [("adamw", 12, 8), ("adamw-8bit", 2 + 8 / 256 + 4, 2 + 8 / 256), ("adamw-offload", 0, 0), ("sgd", 4, 0)],
)
def test_bytes_of_a_parameter(optimizer: str, half: float, single: float) -> None:
    assert state_bytes(optimizer, 2, master=True).device == half
    assert state_bytes(optimizer, 4, master=True).device == single
    assert state_bytes(optimizer, 2, master=False).device == {"adamw": 4, "adamw-8bit": 2 + 8 / 256}.get(optimizer, 0)


def test_bytes_on_the_host() -> None:
    """Weight, gradient and two moments; of weights in half precision, moments and another weight in float32."""
    assert state_bytes("adamw-offload", 4, master=True).host == 16 == state_bytes("adamw-offload", 2, master=True).host
    assert state_bytes("adamw-offload", 2, master=False).host == 8


def planned(optimizer: str | None) -> PlanResult:
    layout = {"dp": 1, "pp": 2, "tp": 1, "order": "terapipe", "num_slices": 4, "recompute": "none"}
    return terapipe.plan(
        "gpt3-1b", "dgx-a100:1", batch_size=2, seq_len=1024, optimizer=optimizer, microbatch_size=1, **layout
    )


def test_plans_count_them_on_the_device_and_on_the_host() -> None:
    peaks = {name: planned(name).peak_bytes for name in (None, *OPTIMIZERS)}
    assert peaks[None] == peaks["adamw"] > peaks["adamw-8bit"] > peaks["sgd"] > peaks["adamw-offload"]
    assert planned("adamw-offload").estimate.host_bytes > 0 == planned("adamw").estimate.host_bytes


def test_costs_are_restored_with_their_optimizer() -> None:
    result = planned("adamw-8bit")
    assert PlanResult.from_json(result.to_json()).memory == result.memory
    with pytest.raises(ValueError, match="optimizer is one of adamw, adamw-8bit, adamw-offload, sgd, got 'lion'"):
        planned("lion")
