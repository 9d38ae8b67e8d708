"""A GPT of ours is a GPT-2: the same logits when Hugging Face opens it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from terapipe import GPT, GPTConfig
from terapipe.training.config import RunConfig
from terapipe.training.data.tokenizer import ByteTokenizer
from terapipe.training.export import as_gpt2, check_gpt
from terapipe.training.logging.metrics import read
from tests.support.ranks import Ranks
from tests.support.training_runs import PRESET, TWO_LAYERS, copy_run, short_run
from tests.unit.training.test_model import told
from tests.unit.training.test_run import config, train


@pytest.mark.parametrize("tied", [True, False])
def test_the_same_logits(tied: bool) -> None:
    shape = GPTConfig(layers=2, hidden=24, heads=3, ffn=40, vocab=50, max_seq_len=30, tied=tied)
    gpt = GPT(shape).double()
    with torch.no_grad():
        for number, parameter in enumerate(gpt.parameters()):  # zero biases would hide a mistake
            parameter.add_(torch.sin(torch.arange(parameter.numel()) + number).view_as(parameter) / 10)
    ids = torch.arange(20)[None] * 7 % 50
    state = {name: x for name, x in gpt.state_dict().items() if not (tied and name == "head.weight")}
    exported = as_gpt2(state, shape, torch.float64, 49).eval()
    assert (exported(ids).logits - gpt.logits(gpt(ids))).abs().max() < 1e-12


def test_grouped_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="1 kv_heads for 2 heads"):
        check_gpt(GPTConfig(layers=2, hidden=16, heads=2, kv_heads=1))


def test_a_run_ends_with_it(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "exported"
    ranks(2)(train, told(tmp_path, "model.preset=layers=2,hidden=16,heads=2", f"checkpoints.export={folder}"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("To be")["input_ids"]])
    assert ids.tolist() == [list(b"To be")]
    assert model(ids).logits.shape == (1, 5, 257)


def test_an_interrupted_export_leaves_the_old_one(
    finished_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer was written after the model was put in place, and all else in the folder was deleted."""
    told = copy_run(finished_run, "exported", export=str(tmp_path / "model"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("mine")

    def interrupt(self: ByteTokenizer, folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ByteTokenizer, "save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(told)
    assert [f.name for f in tmp_path.rglob("*")] == ["model", "README.md"]
    train(told)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {
        f.name for f in (tmp_path / "model").iterdir()
    }


@pytest.mark.parametrize("name", ["", "text.txt"])
def test_an_export_does_not_replace_the_run(text_folder: Path, name: str) -> None:
    """An export to the run's own folder deleted its checkpoints; one to a file failed after the last step."""
    told = config(text_folder / "itself", "", *TWO_LAYERS, f"checkpoints.export={text_folder / name}")
    with pytest.raises(ValueError, match=r"checkpoints.export must be a folder of its own"):
        train(told)


def test_the_export_is_announced(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A run ended without a word of what it had written."""
    folder = tmp_path / "exported"
    config = short_run(tmp_path, PRESET, f"checkpoints.export={folder}")
    ranks(1)(train, config)
    said = [row["message"] for row in read(config.folder) if row.get("event") == "export"]
    assert said[-1] == f"wrote model and tokenizer to {folder}"
