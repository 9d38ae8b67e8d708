"""Marks for slow tests that only `make test-all` runs, because others show the same, faster.

A test that is seldom run says so where it stands::

    @pytest.mark.exhaustive               all of it
    @pytest.mark.exhaustive_ids("llama")  its parameters whose id matches this regular expression
    @pytest.mark.gpu_seldom               all of it on pretend GPUs; or gpu_seldom("llama"), as above

A pattern that matches no id of its test any more, because a parameter got another name, fails the collection: the slow
test would otherwise run in every `make test`, and nobody would know why it takes longer.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

MARKS = ("exhaustive_ids", "gpu_seldom")


def mark_seldom(items: Iterable[pytest.Item], on_gpus: bool) -> None:
    """Gives the mark ``exhaustive`` to every test that its own marks call seldom run here."""
    for item in items:
        if any(_is_meant(mark, item) for name in MARKS[: 1 + on_gpus] for mark in item.iter_markers(name)):
            item.add_marker(pytest.mark.exhaustive)


def refuse_idle_patterns(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Ends pytest if a mark's pattern matches no parameters of its test.

    Not where somebody asked for single parameters (``test_x[llama]``), or for those that failed before: the others are
    not collected then.
    """
    if any("[" in argument for argument in config.args) or config.getoption("lf", False):
        return
    if idle := idle_patterns(items):
        raise pytest.UsageError(f"marks whose pattern matches no parameters of their test: {', '.join(idle)}")


def idle_patterns(items: Iterable[Any]) -> list[str]:
    """Marks with a pattern that matches none of the items of their test: its name, and the mark."""
    uses: dict[str, bool] = {}
    for item in items:
        for name in MARKS:
            for mark in item.iter_markers(name):
                if mark.args:
                    key = f"{item.nodeid.partition('[')[0]}: {name}({mark.args[0]!r})"
                    uses[key] = uses.get(key, False) or _is_meant(mark, item)
    return [key for key, is_used in uses.items() if not is_used]


def _is_meant(mark: pytest.Mark, item: Any) -> bool:
    """Whether the mark is for this item: it has no pattern, or one that matches the item's id."""
    return not mark.args or bool(re.search(mark.args[0], item.name.partition("[")[2].removesuffix("]")))
