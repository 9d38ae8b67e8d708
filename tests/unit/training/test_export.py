"""A GPT of ours is a GPT-2: the same logits when Hugging Face opens it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from terapipe import GPT, GPTConfig
from terapipe.training.export import as_gpt2, check_gpt
from tests.support.ranks import Ranks
from tests.unit.training.test_model import told
from tests.unit.training.test_run import train


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
