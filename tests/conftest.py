import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests import pretend
from tests.support.processes import started_with
from tests.support.ranks import Ranks
from tests.support.seldom import mark_seldom, refuse_idle_patterns

torch.set_num_threads(1)
ENDING = 60.0  # seconds that processes have to end after what they served: a killed browser's helpers need a moment
# The same examples every time; `make test-all` looks for others, from a seed that it prints.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    if pretend.is_active():  # exact tests are in float64, for which GPUs have no fast attention
        config.addinivalue_line("filterwarnings", "ignore:attention in torch.float64:RuntimeWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    refuse_idle_patterns(config, items)
    mark_seldom(items, on_gpus=pretend.is_active())


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Whatever tests start ends with them. Set up first, so checked when all other fixtures are gone."""
    mark = f"TERAPIPE_TESTS={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    os.environ[name] = value
    yield
    deadline = time.monotonic() + ENDING
    while (left := started_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"tests left processes behind: {left}"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)``: the group of n processes, started when first asked for."""
    started: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        if size in started and not started[size].usable:
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


@pytest.fixture
def quiet_models() -> Iterator[None]:
    """Hugging Face models and adapters warn of many things that do not matter in tests."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.set_verbosity(level)
