"""What else people switch on in a trainer: checkpoints, best models, adapters, precision, packing, metrics."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from terapipe import Profile, api
from terapipe.runtime.checkpoint.reader import Reader
from tests.support.hf_models import quantization_config
from tests.support.ranks import Ranks
from tests.unit.trainers import runs
from tests.unit.trainers.runs import Run, causal, tuned
from tests.unit.trainers.test_trainer import check

pytestmark = pytest.mark.usefixtures("quiet_models")
SAVING = {"save_strategy": "steps", "save_steps": 3}


def later(run: Run) -> Run:
    """The second half."""
    return Run([entry for entry in run.logs if entry["step"] > 3], run.weights)


def test_resuming_in_another_layout(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """Saved by two stages, resumed by one process and by two stages; the plain trainer has the same curve."""
    wanted = causal(str(tmp_path / "plain"), None)
    check(ranks(2)(partial(causal, **SAVING), str(tmp_path / "two"), {"slices": 5})[0], wanted)
    saved = str(tmp_path / "two" / "checkpoint-3")
    check(later(causal(str(tmp_path / "one"), {"slices": 4}, saved)), later(wanted))
    for found in ranks(2)(causal, str(tmp_path / "again"), {"slices": 3}, saved):
        check(later(found), later(wanted))


def test_the_best_model_and_early_stopping(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    best = {
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
        "max_steps": 12, **SAVING,
    }  # fmt: skip
    stop: dict[str, Any] = {"trainer": {"callbacks": [EarlyStoppingCallback(1)]}}
    wanted = causal(str(tmp_path / "plain"), None, **best, **copy.deepcopy(stop))
    found = causal(str(tmp_path / "own"), {"slices": 5}, **best, **stop)
    assert found.logs[-1]["step"] == 6  # the loss falls, which counts as getting worse here
    check(found, wanted)


def correct(prediction: Any) -> dict[str, float]:
    places = prediction.label_ids[:, 1:] != -100
    best = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((best == prediction.label_ids[:, 1:])[places].mean())}


def test_metrics_of_logits(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    given: dict[str, Any] = {"trainer": {"compute_metrics": correct}, "max_steps": 3}
    wanted = causal(str(tmp_path / "plain"), None, **copy.copy(given)).column("eval_accuracy")
    assert wanted
    for found in ranks(2)(partial(causal, **given), str(tmp_path / "two"), {"slices": 5}):
        assert found.column("eval_accuracy") == pytest.approx(wanted)


def with_adapter(dropout: float = 0.0) -> Any:
    from peft import LoraConfig, get_peft_model

    made = runs.model()
    torch.manual_seed(6)
    lora = LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(made, lora)


def test_lora(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    wanted = causal(str(tmp_path / "plain"), None, model=with_adapter)
    for found in ranks(2)(partial(causal, model=with_adapter), str(tmp_path / "two"), {"slices": 5}):
        check(found, wanted)
    from peft import PeftModel

    saved = PeftModel.from_pretrained(runs.model(), tmp_path / "two" / "final")
    name = "base_model.model.model.layers.3.mlp.down_proj.lora_B.default.weight"
    assert torch.allclose(saved.get_parameter(name), wanted.weights[name])


def adapter_on(folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(6)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), lora)


def test_checkpoints_of_lora_hold_the_adapter(tmp_path: Path) -> None:
    runs.model().save_pretrained(tmp_path / "base")
    model = partial(adapter_on, tmp_path / "base")
    wanted = causal(str(tmp_path / "once"), {"slices": 5}, model=model, **SAVING)
    saved = tmp_path / "once" / "checkpoint-3"
    names = Reader(saved / "pipeline").index.state_dict_metadata
    assert names
    assert all("lora_" in name for name in names)
    found = causal(str(tmp_path / "again"), {"slices": 5}, str(saved), model=model)
    assert all(torch.equal(found.weights[name], wanted.weights[name]) for name in wanted.weights)


def test_lora_with_dropout_recomputed(tmp_path: Path) -> None:
    """Other masks than those of whole sequences, so only the two ways of slices compare; equal to the bit."""
    model = partial(with_adapter, 0.3)
    kept = causal(str(tmp_path / "none"), {"slices": 5}, model=model)
    again = causal(str(tmp_path / "full"), {"slices": 5}, model=model, gradient_checkpointing=True)
    assert kept.column("loss") == again.column("loss")
    assert all(torch.equal(kept.weights[name], again.weights[name]) for name in kept.weights)


@pytest.mark.exhaustive
def test_dpo_with_an_adapter_needs_no_reference(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """The reference is the model without its adapter, between forward and backward."""
    given = {"model": with_adapter, "trainer": {"ref_model": None}}
    wanted = tuned("dpo", str(tmp_path / "plain"), None, **copy.copy(given))
    for found in ranks(2)(partial(tuned, **given), "dpo", str(tmp_path / "two"), {"slices": 5}):
        check(found, wanted, 1e-4)


def test_bfloat16_is_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And planned so: the model was profiled in float32, whose products take many times as long on a GPU."""
    profiles: list[Profile] = []
    measure = api.profile
    monkeypatch.setattr(api, "profile", lambda *a, **k: profiles.append(measure(*a, **k)) or profiles[-1])
    given = {"bf16": True, "model": partial(runs.model, torch.float32)}
    wanted = causal(str(tmp_path / "plain"), None, **copy.copy(given))
    found = causal(str(tmp_path / "own"), {"plan": "auto", "seq_len": 32, "profile_seconds": 0.2}, **given)
    assert [profile.autocast for profile in profiles] == ["bfloat16"]
    assert all(w.dtype == torch.float32 for w in found.weights.values())
    assert found.column("loss") == pytest.approx(wanted.column("loss"), rel=1e-2)
    assert found.column("loss") != pytest.approx(causal(str(tmp_path / "f"), None).column("loss"), rel=1e-5)


MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": True},
        pytest.param({"completions": True}, marks=MORE),
        pytest.param({"loss_type": "dft"}, marks=MORE),
    ],
    ids=str,
)
def test_sft(tmp_path: Path, ranks: Callable[[int], Ranks], changes: dict[str, Any]) -> None:
    if "packing" in changes:
        changes = {**changes, "max_length": 48, "padding_free": True}
    wanted = tuned("sft", str(tmp_path / "plain"), None, **changes)
    for found in ranks(2)(partial(tuned, **changes), "sft", str(tmp_path / "two"), {"slices": 5}):
        check(found, wanted, 1e-5)


def with_virtual_tokens() -> Any:
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(runs.model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fp16": True}, "use bf16=True"),
        ({"torch_compile_mode": "reduce-overhead"}, "torch_compile_mode='reduce-overhead' .*one by one"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True .*take torch_compile=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"optim": "galore_adamw_layerwise"}, "optim=.*in the middle of a backward"),
        ({"optim": "lomo"}, "optim=.*in the middle of a backward"),
        ({"model": partial(runs.model, torch.float16)}, "torch.float16 .*dtype=torch.bfloat16"),
        ({"model": partial(runs.model, attention_dropout=0.1)}, "attention_dropout"),
        ({"model": with_virtual_tokens}, "PROMPT_TUNING adds virtual tokens"),
        (
            {"save_only_model": True, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", **SAVING},
            "save_only_model",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # names of functions are not the same twice
)
def test_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        causal(str(tmp_path), {"slices": 5}, **changes)


class Halves:
    """A step of one's own."""

    def training_step(self, model: Any, inputs: dict[str, Any], items: Any = None) -> Any:
        inputs["labels"] = inputs["labels"].masked_fill(inputs["input_ids"] % 2 == 0, -100)
        return super().training_step(model, inputs, items)  # type: ignore[misc]


def test_a_training_step_of_ones_own_is_called(tmp_path: Path) -> None:
    from transformers import Trainer

    from terapipe.trainers import PipelineMixin

    plain = type("Plain", (Halves, Trainer), {})
    wanted = causal(str(tmp_path / "plain"), None, kind=plain)
    check(causal(str(tmp_path / "own"), {"slices": 5}, kind=type("Own", (PipelineMixin, plain), {})), wanted)


def at_the_end(folder: str, own: dict[str, Any]) -> bool:
    from transformers import TrainerCallback

    seen: dict[str, torch.Tensor] = {}

    class Keep(TrainerCallback):
        def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
            seen.update({name: p.detach().clone() for name, p in model.named_parameters()})

    found = causal(folder, own, max_steps=3, trainer={"callbacks": [Keep()]})
    return all(torch.equal(seen[name], weight) for name, weight in found.weights.items())


def test_callbacks_at_the_end_see_all_weights(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    assert all(ranks(2)(at_the_end, str(tmp_path), {"slices": 5}))


def test_evaluation_before_training_with_checkpointing(tmp_path: Path) -> None:
    changes = {"eval_on_start": True, "gradient_checkpointing": True}
    check(causal(str(tmp_path / "own"), {"slices": 5}, **changes), causal(str(tmp_path / "plain"), None, **changes))


def on_quantized(folder: Path, kind: str) -> Any:
    """Adapters on a quantized base, which on another rank than the first is another one."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from terapipe.hf.quantized import keep_unpacked

    place = folder / str(dist.get_rank() if dist.is_initialized() else 0)
    quantization = quantization_config(kind)
    base = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, quantization_config=quantization)
    keep_unpacked(base)  # the plain trainer's evaluation would end its gradients on some processors
    torch.manual_seed(6)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


@pytest.mark.parametrize("kind", ["nf4", "torchao-float8"])
def test_lora_on_a_quantized_base(kind: str, tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """Ranks that quantized other weights take those of the first, with their scales."""
    pytest.importorskip("bitsandbytes")
    for rank in range(2):
        base = runs.model(torch.float32)
        base.model.layers[0].mlp.up_proj.weight.data.mul_(1 + rank)  # the same whole numbers, other scales
        base.save_pretrained(tmp_path / str(rank))
    model = partial(on_quantized, tmp_path, kind=kind)
    wanted = causal(str(tmp_path / "plain"), None, model=model)
    names = [name for name in wanted.weights if "lora_" in name]
    for found in ranks(2)(partial(causal, model=model), str(tmp_path / "two"), {"slices": 5}):
        assert found.column("loss") == pytest.approx(wanted.column("loss"), rel=1e-5)
        assert found.column("eval_loss") == pytest.approx(wanted.column("eval_loss"), rel=1e-5)
        assert all(torch.allclose(found.weights[name], wanted.weights[name], atol=2e-5) for name in names)


def with_outliers() -> Any:
    made = runs.model()
    made.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return made


def test_quantized_weights_that_are_not_exact_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="llm_int8_threshold"):
        causal(str(tmp_path), {"slices": 5}, model=with_outliers)


def test_a_checkpoint_of_the_plain_trainer_is_refused(tmp_path: Path) -> None:
    causal(str(tmp_path / "plain"), None, max_steps=3, **SAVING)
    with pytest.raises(ValueError, match="not saved through a pipeline"):
        causal(str(tmp_path / "own"), {"slices": 5}, str(tmp_path / "plain" / "checkpoint-3"))


def test_a_checkpoint_of_ours_stops_the_plain_trainer(tmp_path: Path) -> None:
    """It would load the weights and go on with a new optimizer and the schedule's beginning."""
    causal(str(tmp_path / "own"), {"slices": 5}, max_steps=3, **SAVING)
    with pytest.raises(Exception, match="ResumeThroughAPipelineTrainer"):
        causal(str(tmp_path / "plain"), None, str(tmp_path / "own" / "checkpoint-3"))


def before_training(folder: str, own: dict[str, Any] | None, items: int | None) -> dict[str, torch.Tensor]:
    """Gradients of a step that is called by hand."""
    from transformers import Trainer, TrainingArguments

    from terapipe.trainers import PipelineConfig, PipelineTrainer

    with runs.as_under_torchrun():
        arguments = TrainingArguments(**runs.options(Path(folder)))
        given = {"args": arguments, "train_dataset": runs.sequences(4)}
        model = runs.model()
        ours = {} if own is None else {"pipeline": PipelineConfig(**own)}
        trainer = (Trainer if own is None else PipelineTrainer)(model, **given, **ours)
        trainer.training_step(model, runs.collate(list(runs.sequences(4))), items)
        named = model.named_parameters() if own is None else trainer.pipelined.pipe.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}


def test_a_step_before_train(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    wanted = before_training(str(tmp_path), None, 100)
    one = before_training(str(tmp_path), {"slices": 5}, 100)
    two = ranks(2)(before_training, str(tmp_path), {"slices": 5}, 100)
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    for found in (one, {**two[0], **two[1]}):
        assert found.keys() == wanted.keys()
        assert max((found[name] - wanted[name]).abs().max().item() for name in wanted) / largest < 1e-6
    assert before_training(str(tmp_path), {"slices": 5}, None)  # where the plain one does not know how to divide
