"""What a device leaves to plans."""

from dataclasses import replace

import terapipe as tp
from terapipe.planning.hardware import GIB, HOSTS, this_cpu, usable_memory

MODEL = "layers=8,hidden=4096,heads=32"
MANY = {"batch_size": 32, "seq_len": 2048, "dp": 1, "pp": 8, "tp": 1, "order": "terapipe", "num_slices": 4}


def test_part_of_the_memory_is_left_for_context_nccl_and_fragmentation() -> None:
    usable = {name: usable_memory(host.device) / GIB for name, host in HOSTS.items()}
    assert 72 < usable["dgx-h100"] < 76
    assert 34 < usable["p4d.24xlarge"] < 38
    assert 12 < usable["p3.16xlarge"] < 14.5
    device = this_cpu().device
    assert usable_memory(device) == device.memory  # no CUDA, no NCCL
    assert usable_memory(replace(HOSTS["dgx-h100"].device, memory=GIB)) == 0


def test_plans_leave_room_and_say_its_price() -> None:
    """Plans used to fill the memory of the data sheet, 79.1 to 80 of 80 GiB, and could not have started."""
    usable = usable_memory(HOSTS["p3.16xlarge"].device)
    whole = tp.plan(MODEL, "p3.16xlarge:1", memory="16GiB", **MANY)  # type: ignore[arg-type]
    assert usable < whole.peak_bytes <= 16 << 30
    assert "16 GiB per device, more than the 13 GiB that are usable" in str(whole)
    room = tp.plan(MODEL, "p3.16xlarge:1", **MANY)  # type: ignore[arg-type]
    assert room.peak_bytes <= usable == room.budget
    assert "13 GiB per device: 16 GiB, 2.97 GiB less for driver, context, NCCL, fragmentation" in str(room)
    assert room.reserve is not None
    assert room.reserve >= 1
    assert f"{room.reserve - 1:.1%} slower than this order and layout would be with all memory" in str(room)
    assert room.to_dict()["budget"] == usable


def test_progress_is_told() -> None:
    shares: list[float] = []
    tp.compare("gpt-tiny", "p3.16xlarge:1", batch_size=4, seq_len=512, pp=4, dp=1, tp=1, progress=shares.append)
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert shares[-1] == 1
