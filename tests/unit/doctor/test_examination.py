"""What the doctor finds out about a rank and its links, without other processes."""

import json
import socket
import time
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from terapipe.doctor import examination
from terapipe.doctor.examination import Examination, Facts, Link
from terapipe.modeling import kernel_choice
from terapipe.modeling.kernels import CpuFlash


def test_facts_are_what_the_diagnosis_reads() -> None:
    facts = Facts.of_this_rank(3)
    assert facts.rank == 3
    assert set(facts.needs) == {"python", "torch", "numpy"} < set(facts.versions)
    assert ">=" in facts.needs["torch"]
    assert facts.cores
    assert facts.memory > 0


def test_a_kernel_that_falls_back_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examination._kernels() == (["float32 (flash for CPUs)", "bfloat16 (flash for CPUs)"], [])
    kernel_choice.forget()
    monkeypatch.setattr(CpuFlash, "operators", (("_scaled_dot_product_flash_attention_for_cpu", "query"),))
    passed, fallbacks = examination._kernels()
    kernel_choice.forget()
    assert passed == []
    assert len(fallbacks) == 2
    assert "expected (query)" in fallbacks[0]
    assert "Use a version" not in fallbacks[0]


def test_a_port_is_free_or_taken() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert "in use" in examination.why_blocked(port)
    assert examination.why_blocked(port) == ""


def lengths_sent(rate: float, share: float) -> tuple[list[int], Link]:
    """Over a link that brings so many bytes per second, with a clock that is ahead."""
    sent: list[int] = []

    def echo(length: int, following: int) -> tuple[float, float]:
        assert not sent or sent[-1] == length, "a message is as long as the one before has said"
        sent.append(following)
        time.sleep(2 * 8 * length / rate)
        return 8 * length / rate, 7.0

    return sent, examination.measure_link(4, echo, share)


def test_messages_grow_as_long_as_there_is_time() -> None:
    sent, link = lengths_sent(rate=1e12, share=30.0)
    assert max(sent) == max(examination.LENGTHS)
    assert sent[-1] == 0, "the other one must know the end"
    assert (link.rank, link.clock) == (4, 7.0)
    assert (link.latency, link.rate) == (pytest.approx(8e-12), pytest.approx(1e12))
    sent, link = lengths_sent(rate=1e6, share=0.2)
    assert examination.LENGTHS[0] <= max(sent) < 2**17, "a megabyte would have taken two seconds"
    assert link.rate == pytest.approx(1e6)


def store() -> dist.Store:
    shared = dist.HashStore()
    shared.set_timeout(timedelta(seconds=5))
    return shared


def facts(rank: int, host: str = "a (node 0)") -> Facts:
    return replace(Facts.of_this_rank(rank), host=host)


def test_facts_of_another_release_are_read() -> None:
    """Lists of JSON become tuples again; a field that this release does not have is left out."""
    sent = facts(1)
    assert Facts.from_json(json.dumps({**asdict(sent), "of a later release": 1})) == sent


def test_a_rank_that_does_not_come_is_known_by_its_number() -> None:
    shared = store()
    shared.set("facts/1", json.dumps(asdict(facts(1))))
    result = examination._first(shared, 3, timeout=0.1)
    assert result.absent == [2]
    assert result.links == ()
    assert shared.get("go") == b"no"


@pytest.mark.parametrize(("hosts", "short"), [("ab", ["a", "b"]), ("aa", ["a (node 0)", "a (node 1)"])])
def test_hosts_of_one_name_keep_their_numbers(hosts: str, short: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shared = store()
    monkeypatch.setattr(examination, "host_name", lambda: f"{hosts[0]} (node 0)")
    shared.set("facts/1", json.dumps(asdict(facts(1, f"{hosts[1]} (node 1)"))))
    assert list(examination._first(shared, 3, timeout=0.1).hosts) == short


def test_where_the_first_rank_does_not_come_the_second_says_so() -> None:
    result = examination._other(store(), 1, 3, timeout=0.1)
    assert isinstance(result, Examination)
    assert result.failure == "rank 0 did not arrive within 0.1 s"
    assert result.failed_at == "meet"
    assert examination._other(store(), 2, 3, timeout=0.1) is None


def test_failures_of_all_ranks_come_together() -> None:
    shared = store()
    for rank, failure in enumerate(("timed out", "no eth9", "timed out")):
        shared.set(f"failure/{rank}", failure)
    assert examination._failures(shared, 3) == "rank 0 and 2: timed out; rank 1: no eth9"


def test_a_rank_that_dies_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object) -> None:
        raise ChildFailedError("examine", {1: ProcessFailure(1, 99, -9, "none")})

    monkeypatch.setattr(examination, "launch", launch)
    result = examination.alone(2, 29500, 1.0)
    assert result.failure == "rank 1 died with exit code -9"
    assert (result.failed_at, result.port) == ("start", 29500)


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        ("[enforce fail at /a/b/device.cc:84] ifa != nullptr. No address for: x", "No address for: x"),
        ("[/pytorch/gloo/pair.cc:534] Connection closed by peer", "Connection closed by peer"),
        ("timed out\nException raised from somewhere", "timed out"),
    ],
)
def test_errors_are_put_plainly(said: str, plain: str) -> None:
    assert examination.first_line(RuntimeError(said)) == plain
