import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests.ranks import Ranks

USES = 30

torch.set_num_threads(1)
# CI sees the same examples every time; a developer's runs go on looking for others.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)``: the group of n processes, started when first asked for, and again after so many uses: every
    pipeline leaves groups of gloo behind, whose threads slow down all that comes after."""
    started: dict[int, Ranks] = {}
    uses: dict[int, int] = {}

    def of_size(size: int) -> Ranks:
        uses[size] = uses.get(size, 0) + 1
        if size in started and uses[size] % USES == 0:
            started.pop(size).close()
        if size not in started:
            started[size] = Ranks(size)
        return started[size]

    yield of_size
    for group in started.values():
        group.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[[int], Ranks]]:
    """As ``ranks``, for a test that leaves its processes unusable."""
    started: list[Ranks] = []

    def of_size(size: int) -> Ranks:
        started.append(Ranks(size))
        return started[-1]

    yield of_size
    for group in started:
        group.close()
