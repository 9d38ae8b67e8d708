"""What verbs share: one option for every knob, and refusals before anything is computed."""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from terapipe.cli.options import add_request, add_source, check_outputs, load, refuse_with, request_of
from terapipe.planning.options import CostOptions, PlanOptions
from terapipe.planning.profile import Profile


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_source(parser)
    add_request(parser)
    return parser.parse_args(["--cluster", "dgx-a100:1", "--batch-size", "8", "--seq-len", "2048", *arguments])


def test_every_knob_is_an_option_and_an_argument_of_plan() -> None:
    knobs = {field.name for kind in (PlanOptions, CostOptions) for field in fields(kind)} - {"devices"}
    assert set(request_of(parse())) == {"batch_size", "seq_len", *knobs}
    assert request_of(parse("--slice-lengths", "1024,1024"))["slice_lengths"] == (1024, 1024)


def test_an_option_without_effect_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="--tile would have no effect with --num-slices; leave out one or the other"):
        request_of(parse("--num-slices", "4", "--tile", "8"))
    refuse_with("--json", argparse.Namespace(width=None, wide=False), "width", "wide", "unheard_of")


def test_two_outputs_are_two_files(tmp_path: Path) -> None:
    same = tmp_path / "out"
    with pytest.raises(ValueError, match="--svg and html are the same file"):
        check_outputs(argparse.Namespace(html=same, svg=tmp_path / "." / "out"))
    with pytest.raises(ValueError, match="is a folder"):
        check_outputs(argparse.Namespace(html=tmp_path))
    check_outputs(argparse.Namespace(html=tmp_path / "new" / "page.html", svg=same))


def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("[]")
    with pytest.raises(ValueError, match=r"profile\.json: "):
        load(tmp_path / "profile.json", Profile.from_json)
