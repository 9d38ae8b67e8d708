"""Models of a run: presets, Hugging Face's, one's own; planned by measuring, given, or evenly."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from terapipe import Plan
from terapipe.planning.layout import Layout
from terapipe.training.config import DataConfig, ModelConfig, PlanConfig, RunConfig, parse
from terapipe.training.logging.metrics import read
from terapipe.training.model import make_model
from terapipe.training.run_plan import equal_slices, from_file, layout_of, ranks_wanted
from tests.support.hf_models import quantized, save_base
from tests.support.ranks import Ranks
from tests.support.training_runs import PRESET, short_run
from tests.unit.training.test_run import TEXT, losses, train

OWN = Path(__file__).parents[3] / "examples" / "own_model.py"


def told(folder: Path, *replaced: str) -> RunConfig:
    (folder / "text.txt").write_text(TEXT.read_text()[:4000])
    return parse(
        f"""
[data]
train = "{folder / "text.txt"}"
seq_len = 32
batch_size = 2
eval_share = 0.2
[plan]
seconds = 0
[lr]
warmup = 0
[optimizer]
steps = 4
lr = 0.01
[evaluation]
every = 4
sample = 3
[logging]
folder = "{folder / "run"}"
every = 2
tensorboard = false
[failures]
timeout = 300
""",
        replaced,
    )


def test_a_hugging_face_model_is_trained_and_exported(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    shape = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=300
    )
    shape.save_pretrained(tmp_path / "llama")
    folder = tmp_path / "exported"
    config = told(
        tmp_path, f"model.config={tmp_path / 'llama' / 'config.json'}", "model.dtype=bfloat16", "data.tokenizer=train",
        "data.vocab=280", "data.packing=packed", "plan.num_slices=3", f"checkpoints.export={folder}",
    )  # fmt: skip
    ranks(2)(train, config)
    assert len(losses(config.folder)) == 4
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer("to be")["input_ids"]) == "to be"
    again = replace(
        config, model=ModelConfig(folder=str(folder)), logging=replace(config.logging, folder=str(tmp_path / "2"))
    )
    ranks(1)(train, again)
    assert losses(again.folder)[0] < losses(config.folder)[0], "trained weights were read"


def test_a_model_of_ones_own_is_trained(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    config = told(tmp_path, f"model.factory={OWN}:Decoder", "evaluation.sample=0", "plan.slice_lengths=[12,20]")
    ranks(2)(train, config)
    assert losses(config.folder)[-1] < losses(config.folder)[0]


def test_a_measured_run_keeps_its_plan(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    config = told(tmp_path, "model.preset=layers=2,hidden=16,heads=2", "plan.seconds=0.5", "plan.tile=4", "plan.pp=2")
    ranks(2)(train, config, 2)
    kept = (config.folder / "plan.json").read_text()
    assert {"profile.json", "predicted.json", "timeline.json", "plan.json", "report.html"} <= {
        f.name for f in config.folder.iterdir()
    }
    ranks(2)(train, config)
    assert (config.folder / "plan.json").read_text() == kept, "what goes on goes on alike"
    rows = read(config.folder)
    assert all("predicted" in row for row in rows if "loss" in row)
    assert [row["step"] for row in rows if "sample" in row] == [4]
    assert json.loads((config.folder / "ended.json").read_text()) == {"how": "finished", "step": 4}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ModelConfig(factory="nothing"), "module:function"),
        (ModelConfig(factory="nothing:here"), "No module named 'nothing'"),
        (ModelConfig(factory="nothing.py:here"), "no file nothing.py"),
        (ModelConfig(factory="terapipe:nowhere"), "has no function 'nowhere'"),
        (ModelConfig(factory="terapipe.planning.presets:GPTConfig"), "missing|returned"),
        (ModelConfig(preset="gpt-larg"), "unknown model"),
        (ModelConfig(folder="/nowhere"), "config.json"),
    ],
)
def test_models_that_are_none(model: ModelConfig, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        make_model(model, DataConfig(), 257)


def test_layouts() -> None:
    assert layout_of(PlanConfig(), 4, 0) == Layout(1, 4, 1)
    assert layout_of(PlanConfig(dp=2), 4, 0) == Layout(2, 2, 1)
    assert layout_of(PlanConfig(shard=True), 4, 2) == Layout(2, 2, 1, shard=True)
    assert layout_of(PlanConfig(tp=2), 8, 0) == Layout(1, 4, 2)
    with pytest.raises(ValueError, match="must be the number of processes"):
        layout_of(PlanConfig(dp=3), 4, 0)
    with pytest.raises(ValueError, match="is 2, but there are 4"):
        layout_of(PlanConfig(dp=1), 4, 2)
    assert ranks_wanted(PlanConfig(dp=2, pp=3, tp=2)) == 12


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    plan = Plan((1,), ((20, 12),), (0, 1, 2), "terapipe")
    (tmp_path / "plan.json").write_text(plan.to_json())
    config = told(tmp_path, "model.preset=layers=2,hidden=16,heads=2", f"plan.file={tmp_path / 'plan.json'}")
    result = from_file(config, 4)
    assert result is not None
    assert (result.layout, result.plan, result.predicted) == (Layout(2, 2, 1), plan, False)
    with pytest.raises(ValueError, match="1 sequences of 32 tokens to each of 1 replicas"):
        from_file(config, 2)
    assert ranks_wanted(config.plan) == 2


def test_equal_slices() -> None:
    config = parse('[model]\npreset="layers=4,hidden=16,heads=2"\n[data]\ntrain="x"\nseq_len=512\nbatch_size=3')
    made = make_model(config.model, config.data, 257)
    plan = equal_slices(config, made, 2).plan
    assert (plan.sizes, plan.lengths[0], plan.boundaries) == ((1, 1, 1), (64,) * 8, (0, 2, 4))


def test_a_vocabulary_is_refused_not_replaced(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A shape's vocabulary and positions were those of the data, whatever the shape said."""
    with pytest.raises(ValueError, match=r"a model of 100 and a tokenizer of 257; .* vocab=257 in model.preset"):
        ranks(1)(train, short_run(tmp_path, f"{PRESET},vocab=100"))
    with pytest.raises(ValueError, match=r"max_seq_len=8 in model.preset and data.seq_len 16"):
        ranks(1)(train, short_run(tmp_path, f"{PRESET},max_seq_len=8"))


@pytest.mark.parametrize("kind", ["nf4", "torchao-int8"])
def test_adapters_on_a_quantized_model_are_trained_and_exported(
    kind: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Two stages, each of which quantizes its own layers; peft loads what was exported."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    base, folder = save_base(tmp_path / "base", vocab_size=300), tmp_path / "adapter"
    config = told(
        tmp_path, f"model.folder={base}", "model.lora_rank=2", f"model.quantize={kind}", "data.tokenizer=bytes",
        "plan.pp=2", "plan.num_slices=3", f"checkpoints.export={folder}",
    )  # fmt: skip
    ranks(2)(train, config)
    assert len(losses(config.folder)) == 4
    assert losses(config.folder)[-1] < losses(config.folder)[0]
    model = peft.PeftModel.from_pretrained(quantized(base, kind, lora=False), folder)
    trained = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert len(trained) == 4 * 7
    assert all(p.any() for p in trained)
