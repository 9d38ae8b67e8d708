"""One case by the plain class or by ours: what it logs, and the weights that come out; or why it was refused."""

import copy
import logging
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.peers.cases import Case
from tests.unit.trainers.runs import as_under_torchrun, finished, halves, reward, text, tokenizer

COUNT, SLICES, STEPS = 16, 3, 3
SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 1, "initializer_range": 0.2,  # so that tokens differ in what is computed for them
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
SPECIAL: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "gpt_oss": EXPERTS,
    "qwen3_next": EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
                             "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "gpt2": GPT2 | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt2_dropout": GPT2,
}  # fmt: skip
WITHOUT_COUNTERPART = {"epoch", "step", "total_flos", "step_time", "num_tokens"}


class Outcome(NamedTuple):
    """``stopped``: "" or where it ended: "made" when the trainer was made, "trained" in a step."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    stopped: str = ""
    reason: str = ""


def model_of(case: Case, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(5)
    config = AutoConfig.for_model(case.model.removesuffix("_dropout"), **SMALL | SPECIAL.get(case.model, {}))
    if case.kind == "Reward":
        config.num_labels = 1
        return AutoModelForSequenceClassification.from_config(config).to(dtype)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype)


def rows_of(case: Case) -> list[dict[str, Any]]:
    options = case.options
    if case.kind == "SFT":
        if options.get("rows") == "completions":
            return [{"prompt": f"{a} ", "completion": b} for a, b in halves(text(COUNT))]
        return [{"text": row} for row in text(COUNT)]
    pairs = list(zip(halves(text(COUNT)), halves(text(COUNT, 5000)), strict=True))
    if case.kind in ("GRPO", "RLOO"):
        return [{"prompt": a} for (a, _), _ in pairs]
    if case.kind == "KTO":
        return [{"prompt": f"{a} ", "completion": b, "label": i % 3 > 0} for i, ((a, b), _) in enumerate(pairs)]
    rows: list[dict[str, Any]] = [{"prompt": f"{a} ", "chosen": b, "rejected": c} for (a, b), (_, c) in pairs]
    return [row | {"margin": 0.1 * i} for i, row in enumerate(rows)] if options.get("rows") == "margins" else rows


def arguments_of(case: Case, folder: str, exact: bool) -> Any:
    import trl

    given: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "max_steps": STEPS, "save_strategy": "no",
    }  # fmt: skip
    if case.kind in ("GRPO", "RLOO"):
        given["max_completion_length"] = 8
    if not case.defaults:
        given |= {
            "bf16": False, "learning_rate": 5e-3, "per_device_train_batch_size": 2,
            "gradient_checkpointing": case.checkpointing,
        }  # fmt: skip
        if case.kind == "GRPO":
            given["num_generations"] = 2
    given |= {name: value for name, value in case.options.items() if name != "rows"} | (
        {"bf16": False} if exact else {}
    )
    return getattr(trl, f"{case.kind}Config")(**given)


def lora(case: Case) -> Any:
    from peft import LoraConfig

    head = ["score"] if case.kind == "Reward" else None
    names = ["c_attn"] if case.model.startswith("gpt2") else ["q_proj", "v_proj"]
    return LoraConfig(
        r=4, target_modules=names, modules_to_save=head, task_type="SEQ_CLS" if head else "CAUSAL_LM",
        init_lora_weights=True if case.defaults else "gaussian",
    )  # fmt: skip


def trainer_of(case: Case, folder: str, *, ours: bool, exact: bool) -> Any:
    """``exact``: with weights in float64 and no autocast, whatever the case says."""
    import trl
    from datasets import Dataset

    import terapipe.trainers.trl as own

    dtype = torch.float32 if case.defaults and not exact else torch.float64
    model, arguments = model_of(case, dtype), arguments_of(case, folder, exact)
    given: dict[str, Any] = {"args": arguments, "processing_class": tokenizer()}
    given["train_dataset"] = Dataset.from_list(rows_of(case))
    if case.adapter:
        given["peft_config"] = lora(case)
    if case.kind in ("GRPO", "RLOO"):
        several = "multi_objective_aggregation" in case.options
        given["reward_funcs"] = [reward, longest] if several else reward
        if case.options.get("beta", case.kind == "RLOO"):  # the reference is loaded from where the model is from
            save(model, Path(folder))
            model.config._name_or_path = folder
    if case.kind in ("DPO", "KTO") and not case.adapter:
        given["ref_model"] = copy.deepcopy(model)
    torch.manual_seed(7)  # of adapters
    if ours:
        return getattr(own, f"Pipeline{case.kind}Trainer")(model, **given, slices=SLICES)
    return getattr(trl, f"{case.kind}Trainer")(model, **given)


def save(model: Any, folder: Path) -> None:
    """On every rank, each of which has a folder of its own; transformers would write on the first only."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    (folder / "config.json").write_text(model.config.to_json_string())
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})


def longest(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) + 0.25 * place for place, ids in enumerate(completion_ids)]


def run(case: Case, ours: bool, exact: bool = False) -> Outcome:
    import datasets
    import transformers
    from transformers import PrinterCallback

    logging.getLogger("trl").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder, as_under_torchrun():
        try:
            trainer = trainer_of(case, str(Path(folder) / "run"), ours=ours, exact=exact)
        except Exception as error:
            return Outcome([], {}, "made", f"{type(error).__name__}: {error}")
        trainer.remove_callback(PrinterCallback)
        try:
            found = finished(trainer)
        except Exception as error:
            return Outcome([], {}, "trained", f"{type(error).__name__}: {error}")
    logs = [{k: v for k, v in entry.items() if k not in WITHOUT_COUNTERPART} for entry in found.logs[:-1]]
    return Outcome(logs, found.weights)
