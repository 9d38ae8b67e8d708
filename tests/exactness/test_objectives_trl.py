"""TRL's own trainers compute the same losses and gradients on the same batch."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe import Pipeline, Plan, losses
from terapipe.hf import Decoder
from terapipe.hf.verify.small_model import small_model
from terapipe.modeling.stage import IGNORE
from tests.support.hf_models import small_config
from tests.support.models import gradients
from tests.support.ranks import Ranks
from tests.unit.trainers.runs import tokenizer

pytestmark = pytest.mark.usefixtures("quiet_models")
Found = tuple[float, dict[str, Tensor]]
PROMPT, COMPLETION, ROWS = 9, 20, 4
PLAN = Plan((2, 2), ((9, 1, 12, 7), (20, 9)), (0, 1, 4), "terapipe-1f1b")


def model() -> Any:
    return small_model(small_config("llama"), torch.float32).double()


def tokens() -> tuple[Tensor, Tensor]:
    """Token ids, and which of them are of completions: of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 90, (ROWS, PROMPT + COMPLETION), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate((20, 13, 17, 8)):
        mask[row, PROMPT : PROMPT + length] = 1
    return ids, mask


def shifted(values: Tensor, fill: float = 0.0) -> Tensor:
    """What belongs to a token moves to the place that predicts it."""
    return torch.cat([values[:, 1:], torch.full_like(values[:, :1], fill)], 1)


def labels() -> Tensor:
    ids, mask = tokens()
    return shifted(ids.masked_fill(mask == 0, IGNORE), IGNORE)


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def piped(loss_fn: str, targets: Any) -> Found:
    made = {
        "dpo": losses.dpo(beta=0.3),
        "grpo": losses.grpo(beta=0.04, correct_kl=True),
        "dr_grpo": losses.grpo(normalize="constant", max_length=COMPLETION),
    }
    pipe = Pipeline(Decoder(model(), backend="attention"), PLAN, loss_fn=made[loss_fn])
    return pipe.step(tokens()[0], targets).item(), gradients(pipe)


def compare(wanted: Found, found: list[Found]) -> None:
    largest = max(g.abs().max().item() for g in wanted[1].values())
    seen = {name: gradient for _, part in found for name, gradient in part.items()}
    assert seen.keys() == wanted[1].keys()
    for name, truth in wanted[1].items():
        assert (seen[name] - truth).abs().max().item() / largest < 1e-5, name  # TRL computes log-softmax in float32
    assert all(loss == pytest.approx(wanted[0], rel=1e-5) for loss, _ in found)


def result(loss: Tensor, trained: Any) -> Found:
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in trained.named_parameters() if p.grad is not None}


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": ROWS,
    }  # fmt: skip


def test_dpo(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = Dataset.from_list([{"prompt": "w3 w4", "chosen": "w5 w6", "rejected": "w7"}] * ROWS)
    trained, reference = model(), -60 + some(ROWS)
    arguments = DPOConfig(**options(tmp_path), beta=0.3, precompute_ref_log_probs=True)
    trainer = DPOTrainer(
        trained, copy.deepcopy(trained), args=arguments, train_dataset=pairs, processing_class=tokenizer()
    )
    ids, mask = tokens()
    halves = torch.tensor([0, 2, 1, 3])  # TRL has all chosen rows first
    inputs = {
        "input_ids": ids[halves],
        "attention_mask": torch.ones_like(ids),
        "completion_mask": mask[halves],
        "ref_chosen_logps": reference[0::2],
        "ref_rejected_logps": reference[1::2],
    }
    wanted = result(trainer._compute_loss(trainer.model, inputs, False), trained)
    compare(wanted, ranks(2)(piped, "dpo", {"labels": labels(), "reference": reference}))


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_grpo(ranks: Callable[[int], Ranks], tmp_path: Path, kind: str) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trained = model()
    trained.save_pretrained(tmp_path)  # for the reference model
    trained.config._name_or_path = str(tmp_path)
    beta = 0.04 if kind == "grpo" else 0.0
    arguments = GRPOConfig(
        **options(tmp_path), beta=beta, loss_type=kind, num_generations=2, max_completion_length=COMPLETION
    )
    prompts = Dataset.from_list([{"prompt": "w3 w4"}] * ROWS)
    trainer = GRPOTrainer(
        trained, lambda completions, **_: [0.0] * len(completions), args=arguments, train_dataset=prompts,
        processing_class=tokenizer(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    ids, mask = tokens()
    old, reference, advantages = (-3 + some(ROWS, COMPLETION), -3 + some(ROWS, COMPLETION, seed=2), some(ROWS, seed=3))
    inputs = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones_like(ids[:, :PROMPT]),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask[:, PROMPT:],
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
    }
    wanted = result(trainer._compute_loss(trainer.model, inputs), trained)
    whole = [torch.cat([torch.zeros(ROWS, PROMPT).double(), part], 1) for part in (old, reference)]
    counted = labels() != IGNORE
    targets = {
        "labels": labels(),
        "advantages": advantages,
        "old": shifted(whole[0]) * counted,
        "reference": shifted(whole[1]) * counted,
    }
    compare(wanted, ranks(2)(piped, kind, targets))
