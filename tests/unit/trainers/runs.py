"""The same run by a plain trainer and by one with a pipeline: what both log, and the weights that come out."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

TEXT = Path(__file__).parents[3] / "examples/data/shakespeare.txt"
TOKENS = 32


class Run(NamedTuple):
    logs: list[dict[str, float]]
    weights: dict[str, Tensor]

    def column(self, name: str) -> list[float]:
        return [entry[name] for entry in self.logs if name in entry]


@contextmanager
def as_under_torchrun() -> Iterator[None]:
    """Tells accelerate of the processes that a test has, as torchrun's environment would; and forgets it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    several, before = dist.is_initialized(), dict(os.environ)
    if several:
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= dict(zip(names, (rank, rank, size, size), strict=True))
        os.environ |= {} if torch.cuda.is_available() else {"ACCELERATE_USE_CPU": "true"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for kind in (AcceleratorState, GradientState, PartialState):
            kind._shared_state.clear()
        dynamo = [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]  # of TrainingArguments
        for name in (*names, *dynamo, "ACCELERATE_USE_CPU", "MASTER_PORT"):
            os.environ.pop(name, None)
        os.environ |= {name: before[name] for name in names if name in before}


def model(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5 + changes.pop("own_weights", 0) * (dist.get_rank() if dist.is_initialized() else 0))
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=128,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, **changes,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to(dtype)


def sequences(count: int, start: int = 0) -> Any:
    """Of different lengths."""
    from datasets import Dataset

    text = TEXT.read_bytes()[start : start + count * TOKENS]
    ids = [[b % 128 for b in text[i * TOKENS : (i + 1) * TOKENS - (i * 5) % 11]] for i in range(count)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 128)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
    }


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": 6, "learning_rate": 2e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2,
        "lr_scheduler_type": "cosine", "save_strategy": "no", "bf16": False, "seed": 3,
    } | changes  # fmt: skip


def finished(trainer: Any, resume: str | None = None) -> Run:
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return Run(trainer.state.log_history, weights)


def causal(folder: str, own: dict[str, Any] | None, resume: str | None = None, **changes: Any) -> Run:
    """By transformers' Trainer, or if ``own`` says how, by ours; with evaluation."""
    from transformers import Trainer, TrainingArguments

    from terapipe.trainers import PipelineConfig, PipelineTrainer

    with as_under_torchrun():
        extra, kind = changes.pop("trainer", {}), changes.pop("kind", None)
        made = changes.pop("model", model)()
        arguments = TrainingArguments(**options(Path(folder), eval_strategy="steps", eval_steps=3, **changes))
        given = {
            "args": arguments, "train_dataset": sequences(40), "eval_dataset": sequences(6, 9000),
            "data_collator": collate, **extra,
        }  # fmt: skip
        if own is None:
            return finished((kind or Trainer)(made, **given), resume)
        trainer = (kind or PipelineTrainer)(made, **given, pipeline=PipelineConfig(**own))
        found = finished(trainer, resume)
        trainer.save_model(str(Path(folder) / "final"))
        return found


def text(count: int, start: int = 0) -> list[str]:
    """A word of the tokenizer for each letter of the text."""
    letters = TEXT.read_bytes()[start : start + count * TOKENS]
    rows = [letters[i * TOKENS : (i + 1) * TOKENS - (i * 5) % 11] for i in range(count)]
    return [" ".join(f"w{3 + b % 125}" for b in row) for row in rows]


def halves(rows: list[str]) -> list[tuple[str, str]]:
    """Prompts of different lengths, which trainers pad on the left, and what follows them."""
    cuts = [(row.split(), 5 + 2 * i % 7) for i, row in enumerate(rows)]
    return [(" ".join(words[:cut]), " ".join(words[cut:])) for words, cut in cuts]


def tuned(kind: str, folder: str, own: dict[str, Any] | None, **changes: Any) -> Run:
    """By one of TRL's trainers, or if ``own`` says how, by ours."""
    import trl

    from terapipe.trainers import PipelineConfig
    from terapipe.trainers import trl as ours

    with as_under_torchrun():
        extra, made = changes.pop("trainer", {}), changes.pop("model", model)()
        arguments, given = PREPARED[kind](Path(folder), made, changes)
        given |= {"args": arguments, "processing_class": tokenizer(), **extra}
        if own is None:
            return finished(getattr(trl, f"{kind.upper()}Trainer")(made, **given))
        trainer = getattr(ours, f"Pipeline{kind.upper()}Trainer")
        return finished(trainer(made, **given, pipeline=PipelineConfig(**own)))


def _sft(folder: Path, made: Any, changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from datasets import Dataset
    from trl import SFTConfig

    if changes.pop("completions", False):
        rows = [{"prompt": a, "completion": b} for a, b in halves(text(40))]
    else:
        rows = [{"text": row} for row in text(40)]
    data = Dataset.from_list(rows)
    held_out = {"eval_strategy": "steps", "eval_steps": 3}
    config = SFTConfig(
        **options(folder, **held_out) | {"max_length": TOKENS, "gradient_checkpointing": False} | changes
    )
    return config, {"train_dataset": data, "eval_dataset": data.select(range(6))}


def _dpo(folder: Path, made: Any, changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from datasets import Dataset
    from trl import DPOConfig

    pairs = zip(halves(text(40)), halves(text(40, 5000)), strict=True)
    rows = [{"prompt": a, "chosen": b, "rejected": c} for (a, b), (_, c) in pairs]
    config = DPOConfig(
        **options(folder) | {"gradient_checkpointing": False, "beta": 0.3, "learning_rate": 5e-3} | changes
    )
    return config, {"train_dataset": Dataset.from_list(rows), "ref_model": model()}


def _grpo(folder: Path, made: Any, changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from datasets import Dataset
    from trl import GRPOConfig

    config = GRPOConfig(
        **options(folder, max_steps=3) | {
            "gradient_checkpointing": False, "num_generations": 2, "max_completion_length": 12, "temperature": 0.7,
            "beta": 0.0,
        } | changes
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": a} for a, _ in halves(text(40))])
    return config, {"train_dataset": data, "reward_funcs": reward}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Different for equal completions too, so that there is something to learn."""
    return [sum(ids) % 7 + 0.5 * place for place, ids in enumerate(completion_ids)]


PREPARED = {"sft": _sft, "dpo": _dpo, "grpo": _grpo}
