"""run.toml: what is refused, and how."""

from dataclasses import fields
from pathlib import Path

import pytest

from terapipe.planning.memory import parse_bytes
from terapipe.training.config import RunConfig, keys_of, load, parse

SMALL = """
[model]
preset = "gpt-tiny"
[data]
train = "book.txt"
"""


def test_defaults_and_values() -> None:
    config = parse(SMALL)
    assert config.model.preset == "gpt-tiny"
    assert config.data.train == ("book.txt",), "one alone needs no brackets"
    assert config.optimizer.lr == 3e-4


def test_what_is_printed_reads_back() -> None:
    config = parse(
        SMALL, ["plan.slice_lengths=[1000, 24]", "optimizer.lr=1", "data.eval=[a.txt]", 'evaluation.prompt="\\"x"']
    )
    assert parse(config.to_toml()) == config
    assert config.optimizer.lr == 1.0


def test_every_key_is_documented() -> None:
    config = RunConfig()
    for part in fields(config):
        for entry in keys_of(getattr(config, part.name)):
            assert entry.metadata["doc"], (part.name, entry.name)


def test_single_keys_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    config = load(path, ["optimizer.lr=1e-4", "model.preset=gpt-small", "lr.kind=wsd", "plan.shard=true"])
    assert (config.optimizer.lr, config.model.preset, config.lr.kind) == (1e-4, "gpt-small", "wsd")
    assert config.plan.shard


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ("optimizer.learning=1", "unknown key optimizer.learning"),
        ("optimizer.lrr=1", "did you mean 'lr'"),
        ("optimiser.lr=1", r"unknown section \[optimiser\]; did you mean 'optimizer'"),
        ("model.dtype=bf16", "one of float32, bfloat16, float64, got 'bf16'"),
        ("data.seq_len=1.5", "data.seq_len must be a whole number, got 1.5"),
        ("data.seq_len=true", "data.seq_len must be a whole number, got True"),
        ("data.seq_len=0", "data.seq_len must be positive, got 0"),
        ("optimizer.lr=-1", "optimizer.lr must be at least 0"),
        ("optimizer.lr=nan", "optimizer.lr must be at least 0, got nan"),
        ("data.shuffle=1", "data.shuffle must be true or false"),
        ("data.train=[1]", "data.train must be a string, got 1"),
        ("data.train=[]", "at least one file"),
        ("plan.order=terapip", "did you mean 'terapipe'"),
        ("plan.memory=lots", "reads like 16GiB"),
        ("model.folder=x", r"exactly one of .* got preset and folder"),
        ("data.eval_share=2", "at most 1, got 2.0"),
        ("plan.dp=-1", r"\[plan\] dp must be a whole number of at least 1, got -1"),
        ("plan.tp=0", r"\[plan\] tp must be a whole number of at least 1, got 0"),
        ("objective.beta=0.2", r"objective.beta is for kind = dpo, got 'cross_entropy'"),
        ("plan.recompute=full", "unknown key plan.recompute"),
        ("model.quantize=nf4", r"model.quantize is for adapters; set model\.lora_rank"),
        ("model.lora_rank=4", r"model.lora_rank adds adapters to a model with weights; set model\.folder"),
        ("plan.dp=2", "plan.dp 2 must divide data.batch_size 1"),
        ("lr", "SECTION.KEY=VALUE"),
    ],
)
def test_what_is_wrong_is_named(replaced: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(SMALL, [replaced])


def test_what_is_no_toml_is_refused() -> None:
    with pytest.raises(ValueError, match=r"run\.toml is not valid TOML"):
        parse("[model")
    with pytest.raises(ValueError, match=r"\[model\] must be a table"):
        parse("model = 3")


def test_bytes() -> None:
    assert parse_bytes("16GiB") == 16 * 2**30
