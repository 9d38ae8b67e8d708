"""Running checks: one that raises does not keep the next from running."""

from typing import Any

import pytest

from terapipe.doctor.proof import SMALL, Proof, Size, machine, prove


def failing(ranks: int, size: Size) -> Proof:
    raise ValueError("no such kernel\nat line 7")


def test_a_check_that_raises_has_failed_and_the_next_one_runs() -> None:
    names: list[str] = []
    checks = {"bad": failing, "good": lambda ranks, size: Proof(None, f"{ranks} ranks", {"tokens": size.seq_len})}
    told = prove(checks, 3, SMALL, names.append)
    bad, good = told["proofs"]
    assert names == ["bad", "good"]
    assert not told["holds"]
    assert (bad["name"], bad["holds"], bad["says"]) == ("bad", False, "could not be run: ValueError: no such kernel")
    assert (good["holds"], good["says"], good["figures"]) == (None, "3 ranks", {"tokens": 256})


def test_a_figure_is_no_claim() -> None:
    assert prove({"figure": lambda ranks, size: Proof(None, "12 us")}, 1, SMALL)["holds"]


def test_what_is_set_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NCCL_DEBUG", "HOME_OF_SECRETS"):
        monkeypatch.setenv(name, "1")
    told: dict[str, Any] = machine()["environment"]
    assert {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NCCL_DEBUG"} <= set(told)
    assert "HOME_OF_SECRETS" not in told
