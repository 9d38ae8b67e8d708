"""Sequence classifiers in trainers: transformers' own choice of the token and of the loss."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Ranks
from tests.unit.trainers.runs import Run, as_under_torchrun, finished, options, sequences
from tests.unit.trainers.test_trainer import check

pytestmark = pytest.mark.usefixtures("quiet_models")
SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128,
    "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def classifier(kind: str, classes: int) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(5)
    config = AutoConfig.for_model(kind, **SMALL, **GPT2 if kind == "gpt2" else {})
    config.num_labels = classes
    return AutoModelForSequenceClassification.from_config(config).double()


def collate(rows: list[dict[str, Any]], side: str, labels: str) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    for row, to in zip(rows, range(len(rows)), strict=True):
        number = len(row["input_ids"])
        at = slice(longest - number, longest) if side == "left" else slice(0, number)
        ids[to, at], mask[to, at] = torch.tensor(row["input_ids"]).clamp(min=1), 1
    sums = torch.tensor([sum(row["input_ids"]) for row in rows])
    kinds = {
        "class": sums % 3,
        "number": (sums % 7).double(),
        "several": torch.stack([(sums % n == 0) for n in (2, 3, 5)], 1).double(),
    }
    return {"input_ids": ids, "attention_mask": mask, "labels": kinds[labels]}


def classified(folder: str, own: dict[str, Any] | None, kind: str, side: str, labels: str, **changes: Any) -> Run:
    from transformers import Trainer, TrainingArguments

    from terapipe.trainers import PipelineConfig, PipelineTrainer

    with as_under_torchrun():
        held_out = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 3}
        given = {
            "args": TrainingArguments(**options(Path(folder), **held_out, **changes)),
            "train_dataset": sequences(12), "eval_dataset": sequences(4, 9000),
            "data_collator": partial(collate, side=side, labels=labels),
        }  # fmt: skip
        model = classifier(kind, 1 if labels == "number" else 3)
        if own is None:
            return finished(Trainer(model, **given))
        return finished(PipelineTrainer(model, **given, pipeline=PipelineConfig(**own)))


@pytest.mark.parametrize(
    ("kind", "side", "labels"),
    [
        ("llama", "right", "class"),
        ("llama", "left", "several"),
        pytest.param("gpt2", "right", "number", marks=pytest.mark.exhaustive),
    ],
)
def test_curves_are_the_plain_trainers(
    tmp_path: Path, ranks: Callable[[int], Ranks], kind: str, side: str, labels: str
) -> None:
    wanted = classified(str(tmp_path / "plain"), None, kind, side, labels)
    one = classified(str(tmp_path / "one"), {"slices": 5}, kind, side, labels, gradient_checkpointing=True)
    for found in (one, *ranks(2)(classified, str(tmp_path / "two"), {"slices": 5}, kind, side, labels)):
        check(found, wanted)
