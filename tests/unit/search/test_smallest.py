"""The smallest plans: they fit where the search for the fastest finds something that fits, and longest ends there."""

from typing import Any

import pytest

from terapipe import GPTConfig
from terapipe.planning.hardware import Cluster
from terapipe.search.candidates import Candidate, candidates
from terapipe.search.choose import best_rows, choose
from terapipe.search.request import Request
from terapipe.search.smallest import kinds_of, longest, smallest
from terapipe.search.source import ClusterSource

SHAPE = GPTConfig(layers=8, hidden=1024, heads=16, max_seq_len=1)
SOURCE = ClusterSource(SHAPE, Cluster("p3.16xlarge:1"))
BLOCK = 1024


def pool(blocks: int, **fixed: Any) -> list[Candidate]:
    options: dict[str, Any] = {"dp": 1, "pp": 4, "tp": 2, "order": "terapipe", "chunks": 1} | fixed
    return candidates(SOURCE, Request(options.pop("batch_size", 1), blocks * BLOCK, **options))


def found_by_search(own: list[Candidate]) -> bool:
    evaluator = own[0].evaluator
    return any(row.fits for row in best_rows(own, SOURCE, evaluator.request))


CASES: list[dict[str, Any]] = [
    {"memory": "1GiB", "offload": "none"},
    {"memory": "1GiB", "offload": "auto", "num_slices": 16},
    {"memory": "1GiB", "offload": "none", "order": "terapipe-1f1b", "batch_size": 4},
    {"memory": "1GiB", "offload": "none", "recompute": "none", "order": None, "chunks": None},
]


@pytest.mark.parametrize("fixed", CASES)
def test_the_longest_fits_and_the_whole_search_finds_nothing_for_the_next_length(fixed: dict[str, Any]) -> None:
    blocks = longest(lambda blocks: pool(blocks, **fixed), 1 << 10)
    assert 0 < blocks < 1 << 10
    least = smallest(pool(blocks, **fixed))
    assert least.fits
    assert least.estimate().fits
    longer = pool(blocks + max(1, blocks // 50), **fixed)
    assert not found_by_search(longer)
    with pytest.raises(ValueError, match="no plan fits into"):
        choose(SOURCE, longer[0].evaluator.request)


@pytest.mark.parametrize("blocks", [16])
@pytest.mark.parametrize("memory", ["0.8GiB", "0.92GiB", "0.95GiB", "1GiB"])
def test_where_the_search_finds_something_the_smallest_fits(blocks: int, memory: str) -> None:
    own = pool(blocks, memory=memory, offload="none")
    assert smallest(own).fits >= found_by_search(own)


def test_what_only_the_smallest_plan_does_is_planned() -> None:
    """Just enough for the smallest plan: the search begins with few slices and rough counts, and may miss it."""
    least = smallest(pool(64, memory="0.1GiB", offload="none"))
    assert not least.fits
    result = choose(SOURCE, least.evaluator.request.fixed(memory=least.needs.device))
    assert result.estimate.fits
    with pytest.raises(ValueError, match="no plan fits into"):
        choose(SOURCE, least.evaluator.request.fixed(memory=int(least.needs.device * 0.9)))


def test_the_kind_that_needs_least_is_asked_first() -> None:
    own = kinds_of(pool(16, order=None, chunks=None, memory="64GiB"))
    assert len({kind.key for kind in own}) == len(own) > 4
    assert smallest(pool(16, order=None, chunks=None, memory="64GiB")).kind.key == own[0].key


def test_a_host_without_room_is_named() -> None:
    with pytest.raises(ValueError, match="of the host's memory per device"):
        choose(SOURCE, pool(22, memory="1GiB", host_memory="1MiB", num_slices=64)[0].evaluator.request)


def test_there_is_a_smallest_plan_for_however_many_stages() -> None:
    """So many stages that not even the first number of slices stays below the computations that are tried."""
    source = ClusterSource(GPTConfig(layers=126, hidden=1024, heads=16, max_seq_len=1), Cluster("dgx-h100:125"))
    request = Request(80, 8192, dp=8, pp=125, order="terapipe", chunks=1)
    least = smallest([c for c in candidates(source, request) if c.count > 1])
    assert least.plan.num_stages == 125
