"""``terapipe doctor`` as a user runs it: alone, under torchrun, and where something is wrong."""

import json
import os
import socket
import subprocess
import sys

import pytest

from terapipe.cli import main


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def started(*command: str, **variables: object) -> subprocess.Popen[str]:
    surroundings = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.Popen(
        [sys.executable, "-m", *command], env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=1800)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.exhaustive
def test_two_ranks_of_this_machine_can_train(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", str(free_port())]) == 0
    shown = capfd.readouterr().out
    assert "2 ranks on 1 host met at " in shown
    assert "rank 0 (" in shown
    assert "0 problems" in shown
    assert all(check in shown for check in ("versions", "backends", "attention kernel", "cores", "memory", "load"))


@pytest.mark.exhaustive
def test_under_torchrun_the_first_rank_reports_for_all_hosts() -> None:
    """Two agents, as on two hosts; the names of which are the same here."""
    common = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    common += ["--master-port", str(free_port())]
    agents = [started(*common, "--node-rank", str(n), "-m", "terapipe", "doctor", "--json") for n in (0, 1)]
    (code, out, err), (other_code, other_out, _) = (finished(agent) for agent in agents)
    assert (code, other_code) == (0, 0), err
    assert other_out == ""
    found = json.loads(out)
    assert found["status"] in ("ok", "warning")
    checks = {finding["check"]: finding for finding in found["findings"]}
    assert "2 ranks on 2 hosts met" in checks["rendezvous"]["found"]
    assert checks["links of hosts"]["details"][0].count("(node ") == 2
    assert {"clocks", "same versions"} <= set(checks)
    assert "port" not in checks, "torchrun has taken it already"
    assert [rank["rank"] for rank in found["examined"]["ranks"]] == [0, 1]


def test_what_is_wrong_is_said_without_a_traceback() -> None:
    """A rank that never comes, an interface that is not there, a first rank that is not there."""
    command = ("terapipe", "doctor", "--timeout", "1")
    here = {"MASTER_ADDR": "127.0.0.1"}
    processes = {
        "rank 1 of 2 did not arrive": started(*command, RANK=0, WORLD_SIZE=2, MASTER_PORT=free_port(), **here),
        "Unable to find address for: no0": started(
            *command, RANK=0, WORLD_SIZE=1, MASTER_PORT=free_port(), GLOO_SOCKET_IFNAME="no0", **here
        ),
        "timed out": started(*command, RANK=1, WORLD_SIZE=2, MASTER_PORT=free_port(), **here),
    }
    for said, process in processes.items():
        code, out, err = finished(process)
        assert code == 1, err
        (problem,) = [line for line in out.splitlines() if line.startswith("problem")]
        assert "rendezvous" in problem
        assert said in problem
        assert "1 problem," in out
        assert "Traceback" not in err
        assert "frame #" not in err


def test_a_torch_that_does_not_load_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "problem"
    assert "torch does not load" in found["findings"][0]["found"]


@pytest.mark.parametrize(
    ("option", "said"),
    [(("--ranks", "0"), "must be positive"), (("--timeout", "0"), "must be positive"), (("--port", "70000"), "65535")],
)
def test_bad_options_are_one_message(option: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *option]) == 2
    assert said in capsys.readouterr().err
