"""What a device leaves to plans."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import terapipe as tp
from terapipe.planning.device import GIB, usable_memory
from terapipe.planning.hardware import DEVICES, HOSTS, Cluster, save_host, this_cpu

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


def test_clusters_in_words() -> None:
    four = Cluster("l40s:8,pcie,25Gb:4")
    assert (four.host.devices, four.hosts, four.devices) == (8, 4, 32)
    assert four.host.device is DEVICES["l40s"]
    assert (four.host.intra_node.bandwidth, four.host.inter_node.bandwidth) == (24e9, 25e9 / 8)
    cards = Cluster("h100:8, nvlink, 8x400Gb:16")
    assert cards.name == "h100:8,nvlink,8x400Gb:16"
    assert cards.host.intra_node == HOSTS["dgx-h100"].intra_node
    assert cards.host.inter_node.bandwidth == HOSTS["dgx-h100"].inter_node.bandwidth
    assert Cluster("b200:4,900GB,100GB").host.intra_node.bandwidth == 900e9
    alone = Cluster("rtx4090:2")
    assert (alone.host.devices, alone.hosts, alone.host.intra_node.bandwidth) == (2, 1, 12e9)
    assert Cluster("h200").host.intra_node.bandwidth == 360e9, "the fastest link that it has"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("p9:4", "unknown host 'p9' in cluster 'p9:4'; the hosts are p3.16xlarge, .* l40s:8,pcie,25Gb:4"),
        ("dgx-a100:0", "HOST:COUNT with a count of at least 1, try dgx-a100:1; got '0'"),
        ("dgx-a100:x", "HOST:COUNT"),
        ("dgx-a100:999999", "HOST:COUNT .*'999999'"),
        ("l40:8,pcie,25Gb:4", "unknown device 'l40' .* the devices are v100, .*l40s"),
        ("l40s:0,pcie,25Gb:4", "1 to 1024 devices, as in l40s:8; got '0'"),
        ("l40s:8,nvlink,25Gb:4", "l40s has no NVLink .* say pcie, or a bandwidth such as 50GB"),
        ("l40s:8,pcie,25:4", r"the network is a bandwidth per second such as 25Gb \(bits\).* got '25'"),
        ("l40s:8,pcie,0Gb:4", "got '0Gb'"),
        ("l40s:8,warp,25Gb:4", "the link inside of a host is a bandwidth .* got 'warp'"),
        ("l40s:8,pcie,25Gb:0", "1 to 100000 hosts, as in 25Gb:4; got '0'"),
        ("l40s:8,pcie,25Gb:4,9", "DEVICE:PER_HOST,LINK,NETWORK:HOSTS, .* got 4 parts"),
        ("mine.json:4", "mine.json is not a file; `terapipe calibrate --out mine.json` writes one"),
    ],
)
def test_a_malformed_cluster_is_refused_with_the_remedy(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Cluster(text)


@pytest.mark.parametrize(
    "name", ["v100", "a100", "a10", "h200", "b200", "gb200", "l40s", "rtx4090", "rtx5090", "mi300x"]
)
def test_every_device_can_be_planned_for(name: str) -> None:
    result = tp.plan(MODEL, f"{name}:4", batch_size=8, seq_len=2048, pp=4, dp=1, tp=1, order="terapipe", num_slices=4)
    device = DEVICES[name]
    flops = 6 * 8 * 12 * 4096**2 * 8 * 2048 / 4  # of one device, attention left out
    assert 0.1 < flops / result.step_time / device.peak < 0.9


def test_hosts_are_saved_and_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    save_host(HOSTS["dgx-h100"], file, {"measured": "never"})
    assert Cluster(f"{file}:4") == Cluster(f"{file}:4", HOSTS["dgx-h100"], 4)
    assert Cluster(f"{file}:2,pcie,25Gb:3").host.device == DEVICES["h100"]
    content = json.loads(file.read_text())
    content["host"]["device"]["bandwidth"] = 0
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="lacks or misnames bandwidth, which is 0; measure again"):
        Cluster(str(file))
    file.write_text("{}")
    with pytest.raises(ValueError, match="no description of a host: it lacks or misnames 'format'"):
        Cluster(str(file))


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
