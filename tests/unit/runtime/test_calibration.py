"""One device, measured: on the core of this machine, and on pretend GPUs (tests/gpu/selection.py)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import terapipe as tp
from terapipe.cli import main
from terapipe.planning.hardware import HOSTS
from terapipe.runtime.calibration import Calibration, typical_rate


def test_a_calibrated_device_is_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, attention, bandwidth and overheads are measured; a plan takes the file wherever a cluster is named."""
    monkeypatch.chdir(tmp_path)
    shares: list[float] = []
    threads = torch.get_num_threads()
    result = tp.calibrate(seconds=1, progress=shares.append)
    assert torch.get_num_threads() == threads
    assert shares == sorted(shares)
    assert shares[-1] == 1
    device = result.host.device
    assert device.accelerator == torch.cuda.is_available()
    assert min(device.rate, device.bandwidth, device.memory, *device.attention_speed[:2]) > 0
    assert device.min_layer_time > 0 <= device.passes
    assert (device.host_forward > 0) == (device.host_backward > 0) == torch.cuda.is_available()
    assert set(result.measured["products"]) <= {"256", "512", "1024", "2048", "4096", "8192"}
    result.save("mine.json")
    planned = tp.plan("gpt-small", "mine.json:2", batch_size=2, seq_len=512, pp=2, dp=1, tp=1, num_slices=2)
    assert planned.step_time > 0
    assert tp.Cluster("mine.json:2").host == result.host


def test_the_command_says_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "host.json"
    assert main(["calibrate", "--seconds", "0.5", "--out", str(file)]) == 0
    said = capsys.readouterr().out
    for word in ("products", "attention", "GB/s", "terapipe plan --cluster"):
        assert word in said
    assert tp.Cluster(f"{file}").devices >= 1


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--out", "host.txt"]) == 2
    assert "--out must end in .json" in capsys.readouterr().err
    assert main(["calibrate", "--seconds", "0"]) == 2
    other = "cpu" if torch.cuda.is_available() else "dgx-h100"
    with pytest.raises(ValueError, match=f"{other} and this machine must both have GPUs, or neither"):
        tp.calibrate(other)
    with pytest.raises(ValueError, match=r"ends in \.json"):
        Calibration(HOSTS["dgx-h100"], {}).save("host")


def test_rates_are_those_of_large_products() -> None:
    assert typical_rate([1.0, 4.0, 4.0]) == pytest.approx(4.0)
    host = HOSTS["dgx-h100"]
    assert replace(host.device, achieved=0.5).rate == 0.5 * host.device.peak
