"""What torchrun tells a process, and what this process tells those that it starts."""

import os
import threading

import pytest
import torch

from terapipe.runtime.comm import environment


def test_without_torchrun_it_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert environment.rank_and_size() == (0, 1)
    assert (environment.local_rank(), environment.local_ranks()) == (0, 1)
    assert not environment.under_torchrun()
    assert environment.job() == ""
    assert "node" not in environment.host_name().removeprefix(os.uname().nodename)


def test_hosts_of_the_same_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers may both be called "pod"."""
    names = set()
    for number in ("0", "1"):
        monkeypatch.setenv("GROUP_RANK", number)
        names.add(environment.host_name())
    assert len(names) == 2


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with environment.on_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
        assert os.environ["NCCL_SOCKET_IFNAME"].startswith("lo")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with environment.growing_segments():
        assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_ranks_on_several_hosts_do_not_stay_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "MASTER_ADDR": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is put back after the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    environment.stay_on_this_host()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(("value", "blocks"), [("1", True), ("yes", True), ("0", False), ("False", False), ("", False)])
def test_waits_that_block_the_host_are_refused(monkeypatch: pytest.MonkeyPatch, value: str, blocks: bool) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", value)
    if blocks:
        with pytest.raises(ValueError, match=rf"TORCH_NCCL_BLOCKING_WAIT={value}; unset it"):
            environment.refuse_blocking_waits()
    else:
        environment.refuse_blocking_waits()


def test_threads_do_not_hold_up_the_end_of_a_process() -> None:
    names: list[str] = []
    thread = environment.start_thread(
        lambda: names.append(threading.current_thread().name), torch.device("cpu"), "terapipe-x"
    )
    thread.join()
    assert names == ["terapipe-x"]
    assert thread.daemon
