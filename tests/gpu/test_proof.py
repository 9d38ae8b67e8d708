"""`terapipe doctor --prove`, on pretend GPUs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from terapipe import ORDERS
from terapipe.cli import main
from terapipe.doctor import exactness, measurements, proof
from terapipe.doctor.proof import LARGE, SMALL, run_rank, sizes
from terapipe.runtime.comm.environment import local_device
from tests.pretend import nccl

HOLDING = (
    "kernels", "products", "orders", "Hugging Face", "autocast", "checkpoints", "killed rank", "host waits", "memory",
)  # fmt: skip
FIGURES = ("attention", "reserve", "host time", "prediction", "transfers", "links")


@pytest.mark.parametrize(("ranks", "some"), [("1", ["host waits"]), ("2", ["checkpoints", "host waits", "memory"])])
def test_a_part_of_the_proof_kit(
    ranks: str, some: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also that its ranks close their connections: torch warned of each at the end."""
    for module in (exactness, measurements):
        monkeypatch.setattr(module, "CHECKS", {name: check for name, check in module.CHECKS.items() if name in some})
    assert main(["doctor", "--prove", "--ranks", ranks, "--size", "small", "--out", str(tmp_path / "proof.json")]) == 0
    told: dict[str, Any] = json.loads((tmp_path / "proof.json").read_text())
    assert {each["name"]: each["holds"] for each in told["proofs"]} == dict.fromkeys(some, True)
    assert nccl.UNDESTROYED not in capfd.readouterr().err


@pytest.fixture
def tf32() -> Iterator[None]:
    """As NVIDIA's images set it, by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1."""
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)
    torch.set_num_threads(threads)


def test_gradients_are_exact_where_tf32_is_allowed(tf32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proofs failed there: gradients of TF32 products are off by a thousandth."""
    with monkeypatch.context() as patch:
        patch.setattr(proof, "begin_rank", local_device)
        assert run_rank(exactness._hugging_face) > exactness.EXACT, "the pretend GPU has TF32, too"
    assert run_rank(exactness._hugging_face) < exactness.EXACT
    assert torch.get_float32_matmul_precision() == "highest"


def test_verifying_on_a_gpu_allows_no_tf32(tf32: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "llama", "--device", "cuda", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worst"] < 1e-5


def test_products_are_added_in_float32() -> None:
    products = run_rank(exactness._products, SMALL)
    assert len(products["errors"]) == 6
    assert products["error"] < (exactness.EXACT if products["fused"] else exactness.ROUNDED)


def test_memory_that_others_take_is_told() -> None:
    reserve = run_rank(measurements._reserve, SMALL)
    assert reserve["ranks"] == [{"context": 512 << 20, "connected": 512 << 20, "after a step": 512 << 20}]


def test_a_slow_gpu_gets_small_models() -> None:
    """The large ones would take hours."""
    assert sizes(None) == SMALL
    assert sizes("large") == LARGE


@pytest.mark.exhaustive
def test_the_whole_proof_kit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What owners of GPUs are asked to run, in its small form."""
    out = tmp_path / "proof.json"
    assert main(["doctor", "--prove", "--ranks", "2", "--size", "small", "--out", str(out)]) == 0
    told: dict[str, Any] = json.loads(out.read_text())
    proofs = {each["name"]: each for each in told["proofs"]}
    assert told["holds"], [each for each in told["proofs"] if each["holds"] is False]
    assert all(proofs[name]["holds"] is True for name in HOLDING)
    assert set(proofs) == {*HOLDING, *FIGURES}
    assert len(proofs["orders"]["figures"]["errors"]) == len(ORDERS)
    survivors = proofs["killed rank"]["figures"]["told"].values()
    assert not any(each["asked_to_end"] for each in survivors), "the launcher would kill them 30 seconds later"
    assert set(proofs["transfers"]["figures"]["seconds"]) == {"1", "2", "4"}
    assert told["ranks"] == 2
    assert str(out) in capsys.readouterr().out
