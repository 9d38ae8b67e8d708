"""Every knob is in every form, with its type, its range and its text."""

import argparse
import inspect
from dataclasses import fields

import pytest

import terapipe as tp
from terapipe.planning.options import CompareOptions, CostOptions, PlanOptions, explain, names_of
from terapipe.search.request import Request
from terapipe.trainers import PipelineConfig
from terapipe.training.config import PlanConfig, RunConfig, keys_of
from tests.support.commands import options_of_verbs


def options_of(verb: str) -> dict[str, argparse.Action]:
    return {action.dest: action for action in options_of_verbs()[verb]}


@pytest.mark.parametrize("entry", fields(PlanOptions), ids=lambda entry: str(entry.name))
def test_every_form_has_every_knob(entry: object) -> None:
    name, text = entry.name, explain(entry)  # type: ignore[attr-defined]
    assert name in inspect.signature(tp.plan).parameters
    words = " ".join((tp.plan.__doc__ or "").split())
    assert f"{name}: {text[0].upper()}{text[1:]}" in words
    for verb in ("plan", "compare", "simulate"):
        assert text in str(options_of(verb)[name].help)
    if name != "recompute":  # which is model.recompute
        assert name in {key.name for key in keys_of(PlanConfig)}
        assert f"\n{name} = " in RunConfig().to_toml()
    assert name in names_of(PipelineConfig)
    assert name in names_of(Request)


def test_arguments_of_the_functions() -> None:
    batch = {"model", "costs", "batch_size", "seq_len", "progress"}
    plan, compare = (set(inspect.signature(f).parameters) for f in (tp.plan, tp.compare))
    assert plan == batch | {*names_of(PlanOptions), *names_of(CostOptions)}
    assert compare == batch | {*names_of(CompareOptions), *names_of(CostOptions), "same_layout", "tokens", "price"}
    with pytest.raises(TypeError, match=r"^plan\(\) got an unexpected keyword argument 'dpp'"):
        tp.plan("gpt-tiny", "cpu", batch_size=1, seq_len=8, dpp=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp": 0}, "dp must be a whole number of at least 1, got 0"),
        ({"pp": True}, "pp must be a whole number of at least 1, got True"),
        ({"tp": 2**20}, "tp must be at most 65536"),
        ({"shard": 1}, "shard must be true or false, got 1"),
        ({"order": "terapip"}, "unknown order 'terapip'; did you mean 'terapipe'?"),
        ({"recompute": "some"}, "recompute is one of none, light, block, full"),
        ({"memory": "lots"}, "reads like 16GiB"),
        ({"memory": 0}, "memory must be a whole number of at least 1"),
        ({"slice_lengths": (8, 0)}, r"slice_lengths\[1\] must be a whole number of at least 1"),
        ({"num_slices": 2, "slice_lengths": [4, 4]}, "num_slices is a number of equal slices"),
    ],
)
def test_what_a_knob_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        PlanOptions(**options)  # type: ignore[arg-type]


def test_values_in_their_final_form() -> None:
    options = PlanOptions(slice_lengths=[4, 4], recompute=True, memory="1GiB")  # type: ignore[arg-type]
    assert (options.slice_lengths, options.recompute, options.budget) == ((4, 4), "full", 2**30)
    assert options.fixed_slices
