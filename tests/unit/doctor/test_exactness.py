"""What exactness checks conclude from what ranks returned, without ranks."""

from typing import Any

import pytest

from terapipe.doctor import exactness
from terapipe.doctor.proof import SMALL, Proof


def conclude(monkeypatch: pytest.MonkeyPatch, check: str, returned: Any) -> Proof:
    monkeypatch.setattr(exactness, "run_ranks", lambda *_: returned)
    return exactness.CHECKS[check](2, SMALL)


def row(fault: str | None) -> dict[str, Any]:
    return {"kernel": "flash", "dtype": "bfloat16", "head": 64, "case": "window", "error": 0.1, "fault": fault}


def test_one_kernel_with_a_fault_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = conclude(monkeypatch, "kernels", {"combinations": [row(None), row("off by 1.0e-01")], "not used": []})
    assert proof.holds is False
    assert proof.says.endswith("first fault: flash, bfloat16, window: off by 1.0e-01")
    assert conclude(monkeypatch, "kernels", {"combinations": [row(None)], "not used": []}).holds
    assert not conclude(monkeypatch, "kernels", {"combinations": [], "not used": []}).holds, "nothing was tried"


@pytest.mark.parametrize(("fused", "error", "holds"), [(True, 1e-3, False), (False, 1e-3, True), (False, 0.1, False)])
def test_products_that_are_rounded_may_be_farther_off(
    fused: bool, error: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert conclude(monkeypatch, "products", {"fused": fused, "error": error, "errors": {}}).holds is holds


def test_the_worst_order_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert conclude(monkeypatch, "orders", {"gpipe": 1e-7, "terapipe": 2e-3}).holds is False
    assert conclude(monkeypatch, "autocast", {"plain": 1e-2, "pipeline": 3e-2}).holds is False
    assert conclude(monkeypatch, "autocast", {"plain": 1e-2, "pipeline": 1.5e-2}).holds


def test_weights_come_back_from_a_checkpoint_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert conclude(monkeypatch, "checkpoints", 0.0).holds
    assert conclude(monkeypatch, "checkpoints", 1e-9).holds is False
