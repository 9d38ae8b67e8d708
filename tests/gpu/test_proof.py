"""`terapipe doctor --prove`, on pretend GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest

from terapipe.cli import main
from terapipe.doctor import prove
from tests.pretend import nccl

HOLDING = ("kernels", "orders", "checkpoints", "killed rank", "host waits", "memory")


def test_a_part_of_the_proof_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also that its ranks close their connections: torch warned of each at the end."""
    some = ("checkpoints", "host waits", "memory")
    monkeypatch.setattr(prove, "CHECKS", {name: prove.CHECKS[name] for name in some})
    assert main(["doctor", "--prove", "--ranks", "2", "--size", "small", "--out", str(tmp_path / "proof.json")]) == 0
    told: dict[str, Any] = json.loads((tmp_path / "proof.json").read_text())
    assert {proof["name"]: proof["holds"] for proof in told["proofs"]} == dict.fromkeys(some, True)
    assert nccl.UNDESTROYED not in capfd.readouterr().err


@pytest.mark.exhaustive
def test_the_whole_proof_kit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What owners of GPUs are asked to run, in its small form."""
    out = tmp_path / "proof.json"
    assert main(["doctor", "--prove", "--ranks", "2", "--size", "small", "--out", str(out)]) == 0
    told: dict[str, Any] = json.loads(out.read_text())
    proofs = {proof["name"]: proof for proof in told["proofs"]}
    assert told["holds"], [proof for proof in told["proofs"] if proof["holds"] is False]
    assert all(proofs[name]["holds"] is True for name in HOLDING)
    assert set(proofs) == {*HOLDING, "prediction", "links"}
    assert told["ranks"] == 2
    assert str(out) in capsys.readouterr().out
