"""What measurements conclude from what ranks returned, without ranks."""

import pytest
import torch

from terapipe.doctor import measurements
from terapipe.doctor.proof import SMALL

GIB = 1 << 30
LISTING = """\
GPU-aa, 101
GPU-bb, 102
GPU-aa, 102
GPU-bb, [N/A]
"""


def test_processes_on_several_gpus_are_counted() -> None:
    assert measurements.gpus_of_processes(LISTING) == {"101": 1, "102": 2}
    assert measurements.gpus_of_processes("") == {}


@pytest.mark.parametrize(
    ("processes", "holds", "said"),
    [
        (None, None, "nvidia-smi, which lists processes, is not here"),
        ({"101": 1, "102": 1}, True, "0 of 2 processes are on several GPUs"),
        ({"101": 1, "102": 2}, False, "1 of 2 processes are on several GPUs"),
    ],
)
def test_a_rank_on_two_gpus_is_a_fault(
    processes: dict[str, int] | None, holds: bool | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes half a GiB of a GPU that is another rank's."""
    rows = [{"after a step": GIB}, {"after a step": 3 * GIB // 2}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measurements, "run_ranks", lambda *_: {"ranks": rows, "processes": processes})
    proof = measurements.reserve(2, SMALL)
    assert proof.holds is holds
    assert "take 1.00 to 1.50 GiB of each GPU" in proof.says
    assert said in proof.says


@pytest.mark.parametrize(("measured", "holds"), [(105, True), (92, True), (112, False), (80, False)])
def test_predicted_bytes_must_be_close(measured: int, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "run_ranks", lambda *_: [(100, 100), (measured, 100)])
    assert measurements.memory(2, SMALL).holds is holds
