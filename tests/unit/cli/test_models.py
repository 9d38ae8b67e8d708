"""``terapipe models``: the list of this release, without loading transformers."""

import json
from importlib import resources

import pytest

from terapipe.cli import main


def test_the_list_is_that_of_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == json.loads(resources.files("terapipe.hf").joinpath("models.json").read_text("utf-8"))


def test_the_last_line_counts_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    exact = sum(row["exact"] for row in models)
    assert f"{exact} of {len(models)} types are exact" in shown
    assert all(any(line.startswith(row["model"]) for line in shown.splitlines()) for row in models)
