"""`terapipe doctor --prove`, on pretend GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest

from terapipe.cli import main


def test_the_whole_proof_kit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What owners of GPUs are asked to run, in its small form."""
    out = tmp_path / "proof.json"
    assert main(["doctor", "--prove", "--ranks", "2", "--size", "small", "--out", str(out)]) == 0
    told: dict[str, Any] = json.loads(out.read_text())
    proofs = {proof["name"]: proof for proof in told["proofs"]}
    assert told["holds"], [proof for proof in told["proofs"] if proof["holds"] is False]
    holding = ("kernels", "orders", "checkpoints", "killed rank", "host waits", "memory")
    assert all(proofs[name]["holds"] is True for name in holding)
    assert set(proofs) == {*holding, "prediction", "links"}
    assert told["ranks"] == 2
    assert str(out) in capsys.readouterr().out
