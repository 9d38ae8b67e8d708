"""docs/predictions.md and the README have the numbers that the simulator gives today."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from terapipe.published.table import Table, names
from tests.docs.test_documentation import DOCS, ROOT

REMEDY = "run: python docs/predictions.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "predictions.py"))


def test_the_page_has_the_numbers_of_today(script: dict[str, Any]) -> None:
    """Of the tables that take no time; the others are compared by nothing but their presence."""
    text = script["PAGE"].read_text(encoding="utf-8")
    fast = [Table.load(name) for name in names() if name not in script["SLOW"]]
    assert script["page"](fast, text) == text, REMEDY


def test_the_page_has_every_table() -> None:
    text = (DOCS / "predictions.md").read_text(encoding="utf-8")
    for name in names():
        assert f"\n| {name} |" in text, REMEDY
        assert f"### {Table.load(name).title}\n" in text, REMEDY


def test_blind_figures_stay_as_they_were(script: dict[str, Any]) -> None:
    """They are what was simulated before causes were looked for. Once the script wrote later figures over them."""
    text = script["PAGE"].read_text(encoding="utf-8")
    blind = "| torchtitan | 4 | 27 % | +39 % |"
    assert blind in script["page"]([Table.load("torchtitan")], text).partition("## Blind figures")[2]


def test_the_readme_has_the_numbers_of_today(script: dict[str, Any]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert script["OPENING"] in text
    assert script["readme"](text) == text, REMEDY


def test_the_file_of_ones_own_is_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"```text\n(.*?)```", (DOCS / "predictions.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "ours.toml").write_text(example)
    assert [cell.ours is not None for cell in Table.load(str(tmp_path / "ours.toml")).cells] == [True, True]
