"""A host that is cut off: the run ends on the others, with a message that names it."""

import re

import pytest

from tests.support.hosts import hosts, torchrun, why_not

reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")


@pytest.mark.parametrize(("data", "pipe"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.exhaustive)])
def test_a_host_that_is_cut_off_is_named(data: int, pipe: int) -> None:
    with hosts(2, rate="1gbit", delay="1ms") as (near, far):
        running = torchrun([near, far], "-m", "tests.support.steps_on_hosts", str(data), str(pipe))
        assert running[0].stdout is not None
        for line in running[0].stdout:
            if "made a step" in line:
                break
        far.cut()
        output = running[0].communicate(timeout=900)[0]
        assert running[0].returncode != 0
        # torchrun may have given the first number to either host.
        message = re.search(r"rank \d stopped: (.*)", output)
        assert message is not None, output
        assert re.match(r"rank \d on node1 \(node \d\) did not answer in time", message[1])
