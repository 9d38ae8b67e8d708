"""What a model is told between a forward and its backward: gradients are those of the forward, however computed."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terapipe import next_token_labels
from terapipe.trainers import PipelineConfig, pipelined
from tests.support.ranks import Ranks
from tests.unit.trainers import runs
from tests.unit.trainers.runs import Run
from tests.unit.trainers.test_trainer import check

pytestmark = pytest.mark.usefixtures("quiet_models")
MODES = ("none", "light", "block", "full")
MORE = pytest.mark.exhaustive


def ids() -> Tensor:
    return torch.randint(3, 128, (3, 29), generator=torch.Generator().manual_seed(1))


def lora(**changes: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **{"init_lora_weights": False, **changes})


def adapted(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """With two adapters, of which the first is active."""
    from peft import get_peft_model

    torch.manual_seed(6)
    made = get_peft_model(runs.model(dtype), lora(**changes))
    made.add_adapter("other", lora())
    made.set_adapter("default")
    return made.train()


def reference(model: Any) -> None:
    """What most switches are made for."""
    with torch.no_grad():
        model(input_ids=ids())


def disable_adapters(model: Any) -> None:
    with model.disable_adapter():
        reference(model)


def disable_adapters_for_good(model: Any) -> None:
    """peft freezes them, so that autograd gives them no gradient either."""
    model.base_model.disable_adapter_layers()
    reference(model)


def take_another_adapter(model: Any) -> None:
    model.set_adapter("other")
    reference(model)
    model.set_adapter("default")


def take_both_adapters(model: Any) -> None:
    model.base_model.set_adapter(["default", "other"])
    reference(model)


def keep_another_adapter(model: Any) -> None:
    model.set_adapter("other")
    reference(model)


def scale_adapters(model: Any) -> None:
    for module in model.modules():
        with suppress(AttributeError):
            module.set_scale("default", 5.0)
    reference(model)


def freeze(model: Any) -> None:
    model.requires_grad_(False)
    reference(model)


def thaw(model: Any) -> None:
    model.requires_grad_(True)
    reference(model)


def change_modules(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5
    reference(model)


SWITCHES = (
    disable_adapters, disable_adapters_for_good, take_another_adapter, take_both_adapters, keep_another_adapter,
    scale_adapters, freeze, thaw, change_modules,
)  # fmt: skip


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def reset(model: Any) -> None:
    model.base_model.enable_adapter_layers()
    model.set_adapter("default")
    model.requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name and "default" in name)
        p.grad = None
    for module in model.modules():
        with suppress(AttributeError):
            module.set_scale("default", 1.0)
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-6


def switched(mode: str | None) -> list[dict[str, Tensor]]:
    """Gradients after each of the switches. ``mode``: of recomputation, None for the plain model."""
    with runs.as_under_torchrun():
        model, each = adapted(), []
        if mode is not None:
            pipelined(model, config=PipelineConfig(slices=5, recompute=mode))
        for switch in SWITCHES:
            reset(model)
            loss = model(input_ids=ids(), labels=ids()).loss
            switch(model)
            loss.backward()
            each.append(gradients(model))
        return each


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor], case: str = "", bound: float = 2e-7) -> None:
    """transformers computes the loss in float32."""
    assert found.keys() == wanted.keys(), case
    largest = max([g.abs().max().item() for g in wanted.values()], default=1.0)
    for name, gradient in wanted.items():
        assert (gradient - found[name]).abs().max().item() / largest < bound, (case, name)


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Tensor]]:
    return switched(None)


@pytest.mark.parametrize("mode", MODES)
def test_switches_between_forward_and_backward(mode: str, plain: list[dict[str, Tensor]]) -> None:
    for switch, found, wanted in zip(SWITCHES, switched(mode), plain, strict=True):
        compare(found, wanted, switch.__name__)


def test_switches_with_two_stages(plain: list[dict[str, Tensor]], ranks: Callable[[int], Ranks]) -> None:
    for switch, *parts, wanted in zip(SWITCHES, *ranks(2)(switched, "full"), plain, strict=True):
        compare({name: gradient for part in parts for name, gradient in part.items()}, wanted, switch.__name__)


def with_dropout(mode: str, between: Callable[[Any], None]) -> dict[str, Tensor]:
    model = adapted(lora_dropout=0.3)
    pipelined(model, config=PipelineConfig(slices=5, recompute=mode))
    torch.manual_seed(3)
    loss = model(input_ids=ids(), labels=ids()).loss
    between(model)
    loss.backward()
    return gradients(model)


def evaluate(model: Any) -> None:
    model.eval()
    reference(model)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_before_the_backward_of_dropout(mode: str) -> None:
    """Slices draw other masks than whole sequences, so slices that keep everything are what to compare with."""
    compare(with_dropout(mode, evaluate), with_dropout("none", lambda model: None), bound=1e-12)


def round_under_autocast(module: Any, arguments: Any, output: Tensor) -> Tensor:
    return output.bfloat16() if torch.is_autocast_enabled("cpu") else output


def in_another_precision(first: bool, second: bool) -> dict[str, Tensor]:
    """Forward and backward in one, a reference between them in another."""
    with runs.as_under_torchrun():
        model = adapted(torch.float32)
        model.get_base_model().model.layers[1].register_forward_hook(round_under_autocast)  # what stages send
        pipelined(model, config=PipelineConfig(slices=5, recompute="full"))
        for _ in range(2):  # stages learn in a run what they send each other
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=first):
                loss = model(input_ids=ids(), labels=ids()).loss
            with torch.autocast("cpu", torch.bfloat16, enabled=second):
                reference(model)
            loss.backward()
        return gradients(model)


@pytest.mark.parametrize(
    ("first", "size"), [(True, 2), *(pytest.param(*case, marks=MORE) for case in ((True, 1), (False, 1), (False, 2)))]
)
def test_a_reference_in_another_precision(first: bool, size: int, ranks: Callable[[int], Ranks]) -> None:
    def run(second: bool) -> list[dict[str, Tensor]]:
        return [in_another_precision(first, second)] if size == 1 else ranks(2)(in_another_precision, first, second)

    for found, wanted in zip(run(not first), run(first), strict=True):
        compare(found, wanted, bound=1e-12)


def test_a_step_that_trains_nothing_is_said_once() -> None:
    model = adapted()
    pipelined(model, config=PipelineConfig(slices=5))
    model.base_model.disable_adapter_layers()
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    with pytest.raises(ValueError, match=r"32 such as .*lora_A.*switch adapters on"):  # plain PyTorch raises, too
        model(input_ids=ids(), labels=ids()).loss.backward()
    again = pipelined(adapted(), config=PipelineConfig(slices=5)).pipe
    (0 * again.token_outputs(ids(), next_token_labels(ids()))).sum().backward()
    with pytest.warns(UserWarning, match="exactly zero.*advantages"):
        again.clip_grad_norm_(1.0)
    again.clip_grad_norm_(1.0)


# TRL


def from_a_configuration() -> tuple[Any, dict[str, Any]]:
    """As most people do: the reference is the model with its adapter off."""
    return runs.model(), {"peft_config": lora(init_lora_weights=True)}


def from_a_peft_model() -> tuple[Any, dict[str, Any]]:
    """TRL copies its adapter, which is the reference."""
    from peft import get_peft_model

    made = runs.model()
    torch.manual_seed(6)
    return get_peft_model(made, lora()), {}


WAYS = {
    "configuration": (from_a_configuration, {}),
    "peft model": (from_a_peft_model, {}),
    "precomputed": (from_a_configuration, {"precompute_ref_log_probs": True}),  # before the trainer trains
    "reentrant": (from_a_configuration, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
}


def tuned_lora(kind: str, way: str, folder: str, own: dict[str, Any] | None) -> Run:
    """By TRL's trainer with its default arguments, gradient checkpointing above all, or with ``own``, by ours."""
    import trl
    from datasets import Dataset

    from terapipe.trainers import PipelineMixin
    from terapipe.trainers import trl as ours

    make, changes = WAYS[way]
    pairs = list(zip(runs.halves(runs.text(16)), runs.halves(runs.text(16, 5000)), strict=True))
    if kind == "dpo":
        rows = [{"prompt": a, "chosen": b, "rejected": c} for (a, b), (_, c) in pairs]
    else:
        rows = [{"prompt": a, "completion": b, "label": i % 3 > 0} for i, ((a, b), _) in enumerate(pairs)]
    with runs.as_under_torchrun():
        model, extra = make()
        config = getattr(trl, f"{kind.upper()}Config")(
            output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=3, bf16=False,
            per_device_train_batch_size=4, learning_rate=2e-2, save_strategy="no", **changes,
        )  # fmt: skip
        assert config.gradient_checkpointing
        plain = getattr(trl, f"{kind.upper()}Trainer")
        given = {"args": config, "train_dataset": Dataset.from_list(rows), "processing_class": runs.tokenizer()}
        if own is None:
            return runs.finished(plain(model, **given, **extra))
        trainer = getattr(ours, f"Pipeline{plain.__name__}", None) or type("Own", (PipelineMixin, plain), {})
        return runs.finished(trainer(model, **given, **extra, pipeline=PipelineConfig(**own)))


CASES = [
    ("dpo", "configuration"),
    pytest.param("kto", "configuration", marks=MORE),
    pytest.param("dpo", "peft model", marks=MORE),
    pytest.param("kto", "peft model", marks=MORE),
    pytest.param("dpo", "precomputed", marks=MORE),
    pytest.param("dpo", "reentrant", marks=MORE),
    pytest.param("kto", "reentrant", marks=MORE),
]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_trl_with_lora_and_default_arguments(
    kind: str, way: str, tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    wanted = tuned_lora(kind, way, str(tmp_path / "plain"), None)
    assert all(norm > 0 for norm in wanted.column("grad_norm"))
    check(tuned_lora(kind, way, str(tmp_path / "one"), {"slices": 5}), wanted, 1e-4)
    for found in ranks(2)(partial(tuned_lora, kind, way), str(tmp_path / "two"), {"slices": 5}):
        check(found, wanted, 1e-4)
