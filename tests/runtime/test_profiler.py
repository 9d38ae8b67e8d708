"""Messages between ranks, measured: over which links, and for how long at most."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch.distributed as dist

from terapipe.modeling.gpt import GPT
from terapipe.planning.profile import Transfer
from terapipe.presets import PRESETS
from terapipe.runtime import profiler
from tests.ranks import Ranks


def measured(hosts: str, seconds: float) -> tuple[tuple[str, ...], list[Transfer]]:
    """The hosts, one letter for each rank's, and the messages between them, in about so many seconds for each link."""
    name = hosts[dist.get_rank()]
    with patch.object(profiler, "host_name", lambda: name), patch.object(profiler, "SENDING", seconds):
        made = profiler.Profiler(GPT(PRESETS["gpt-tiny"]), layers=1, tokens=16)
        return made.hosts, made._transfers()


@pytest.mark.parametrize(("hosts", "kinds"), [("aa", [False]), ("ab", [True]), ("abb", [False, True])])
def test_neighbours_on_one_host_and_on_two(ranks: Callable[[int], Ranks], hosts: str, kinds: list[bool]) -> None:
    for found, transfers in ranks(len(hosts))(measured, hosts, 60.0):
        assert found == tuple(hosts)
        measured_kinds = [t.between_hosts for t in transfers]
        assert measured_kinds == [kind for kind in kinds for _ in profiler.MESSAGES]
        assert [t.nbytes for t in transfers] == [*profiler.MESSAGES] * len(kinds)
        assert all(len(t.seconds) >= profiler.LEAST and min(t.seconds) > 0 for t in transfers)


def test_a_slow_link_is_measured_with_small_messages(ranks: Callable[[int], Ranks]) -> None:
    one, other = (transfers for _, transfers in ranks(2)(measured, "ab", 1e-9))
    assert [t.nbytes for t in one] == list(profiler.MESSAGES[: profiler.LEAST])
    assert all(len(t.seconds) == profiler.LEAST for t in one[1:])
    assert one == other


def test_one_rank_has_nobody_to_send_to(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(1)(measured, "a", 60.0) == [(("a",), [])]
