"""Marks for slow tests that only `make test-all` runs, because others show the same, faster.

A test that is seldom run says so where it stands::

    @pytest.mark.exhaustive               all of it
    @pytest.mark.exhaustive_ids("llama")  its parameters whose id matches this regular expression
    @pytest.mark.gpu_seldom               all of it on pretend GPUs; or gpu_seldom("llama"), as above
"""

import re
from collections.abc import Iterable

import pytest


def mark_seldom(items: Iterable[pytest.Item], on_gpus: bool) -> None:
    """Gives the mark ``exhaustive`` to every test that its own marks call seldom run here."""
    for item in items:
        marks = [*item.iter_markers("exhaustive_ids"), *(item.iter_markers("gpu_seldom") if on_gpus else ())]
        if any(not mark.args or re.search(mark.args[0], _id_of(item)) for mark in marks):
            item.add_marker(pytest.mark.exhaustive)


def _id_of(item: pytest.Item) -> str:
    """What stands in brackets behind the name of a test."""
    return item.name.partition("[")[2].removesuffix("]")
