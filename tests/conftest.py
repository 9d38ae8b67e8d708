import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests.ranks import Ranks

torch.set_num_threads(1)
# CI sees the same examples every time; a developer's runs go on looking for others.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)``: the group of n processes, started when first asked for."""
    started: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
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
