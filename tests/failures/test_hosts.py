"""Several hosts on one machine: what is measured of a slow link between them."""

import sys
from pathlib import Path

import pytest

from terapipe.planning.profile import Profile
from tests.support.hosts import Host, finish, hosts, torchrun, why_not

TOKENS = 512


@pytest.fixture(scope="module", autouse=True)
def _permitted() -> None:
    if reason := why_not():
        pytest.skip(reason)


def profiled(two: list[Host], out: Path) -> Profile:
    options = ["--model", "gpt-tiny", "--seq-len", str(TOKENS), "--ranks", "2", "--seconds", "2", "--out", str(out)]
    finish(torchrun(two, "-m", "terapipe", "profile", *options))
    return Profile.from_json(out.read_text())


def least(profile: Profile, nbytes: int) -> float:
    """Seconds when nothing else held it up."""
    (found,) = [t for t in profile.transfers if t.nbytes == nbytes]
    return min(found.seconds)


@pytest.mark.exhaustive
def test_a_slow_link_is_measured(tmp_path: Path) -> None:
    """Bounds in one direction only: on a busy machine a message may take longer than its link, never shorter."""
    with hosts(2, rate="100mbit", delay="5ms") as two:
        slow = profiled(two, tmp_path / "slow.json")
    assert [name.split()[0] for name in slow.hosts] == ["node0", "node1"]
    assert all(t.between_hosts for t in slow.transfers)
    assert all(min(t.seconds) >= 8 * t.nbytes / 100e6 + 5e-3 for t in slow.transfers)
    with hosts(2) as two:
        fast = profiled(two, tmp_path / "fast.json")
    largest = max(t.nbytes for t in slow.transfers)
    assert least(fast, largest) < least(slow, largest)


SERVER = "import socket; s = socket.create_server(('', 9)); print('ready', flush=True)\nwhile True: s.accept()"
CLIENT = "import socket; socket.create_connection(('node1', 9), timeout=5)"


def test_a_host_that_is_cut_off_is_silent() -> None:
    with hosts(2) as (here, there):
        names = Path("/run/netns") / here.namespace, Path("/etc/netns") / there.namespace
        assert all(name.exists() for name in names)
        serving = there.start(sys.executable, "-c", SERVER)
        assert serving.stdout is not None
        assert serving.stdout.readline() == "ready\n"
        finish([here.start(sys.executable, "-c", CLIENT)])
        there.cut()
        with pytest.raises(RuntimeError, match="timed out"):
            finish([here.start(sys.executable, "-c", CLIENT)])
        there.mend()
        finish([here.start(sys.executable, "-c", CLIENT)])
    assert serving.poll() is not None
    assert not any(name.exists() for name in names)
