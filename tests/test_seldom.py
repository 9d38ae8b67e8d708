"""Marks of tests that are seldom run still match what they were made for."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.seldom import idle_patterns


@dataclass
class Item:
    """A test as pytest collected it."""

    name: str
    mark: pytest.Mark

    @property
    def nodeid(self) -> str:
        return f"test_file.py::{self.name}"

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return iter([self.mark] if self.mark.name == name else [])


@pytest.mark.parametrize("kind", ["exhaustive_ids", "gpu_seldom"])
def test_patterns_that_match_no_parameters_are_named(kind: str) -> None:
    mark = getattr(pytest.mark, kind)
    items = [Item(f"test_it[{name}]", mark("^llama").mark) for name in ("gpt2", "llama-2")]
    assert idle_patterns(items) == []
    items = [Item(f"test_it[{name}]", mark("^mistral").mark) for name in ("gpt2", "llama-2")]
    assert idle_patterns(items) == [f"test_file.py::test_it: {kind}('^mistral')"]
    assert idle_patterns([Item("test_it", pytest.mark.gpu_seldom.mark)]) == []
