"""``torch_compile`` of transformers' arguments: layers are compiled one by one, and the curve stays the same."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from terapipe import Plan
from terapipe.hf import Decoder
from terapipe.trainers.config import spec_of
from tests.support.ranks import Ranks
from tests.unit.trainers.runs import Run, causal, model, tuned
from tests.unit.trainers.test_trainer import check

pytestmark = pytest.mark.usefixtures("quiet_models")
STEPS = {"max_steps": 3}


def compiled(kind: str, folder: str, own: dict[str, Any], backend: str, **changes: Any) -> tuple[Run, int]:
    """A run, and how many pieces of code torch's compiler was asked for."""
    from torch._dynamo.backends import registry

    asked: list[Any] = []
    compiler: Any = registry.lookup_backend(backend)

    def count(graph: Any, inputs: Any, **named: Any) -> Any:
        asked.append(graph)
        return compiler(graph, inputs, **named)

    torch._dynamo.reset()
    with mock.patch.dict(registry._COMPILER_FNS, {backend: count}):
        options = STEPS | {"torch_compile_backend": backend} | changes
        found = causal(folder, own, **options) if kind == "causal" else tuned(kind, folder, own, **options)
    return found, len(asked)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_device(backend: str, tmp_path: Path) -> None:
    wanted = causal(str(tmp_path / "plain"), None, **STEPS)
    found, pieces = compiled("causal", str(tmp_path / "own"), {"slices": 5}, backend)
    check(found, wanted)
    assert pieces > 0


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("causal", {}), ("sft", {"model": adapted, "gradient_checkpointing": True}), ("dpo", {})],
    ids=["causal", "sft", "dpo"],
)
def test_two_stages(kind: str, changes: dict[str, Any], tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """With a loss of the model's outputs, with adapters in layers that are computed again, and with a reference."""
    plain = partial(causal) if kind == "causal" else partial(tuned, kind)
    wanted = plain(str(tmp_path / "plain"), None, **STEPS, **changes)
    run = partial(compiled, **changes)
    for found, pieces in ranks(2)(run, kind, str(tmp_path / "two"), {"slices": 5}, "aot_eager"):
        check(found, wanted, 1e-5)
        assert pieces > 0


@pytest.mark.exhaustive
def test_inductor(tmp_path: Path) -> None:
    wanted = causal(str(tmp_path / "plain"), None, **STEPS)
    check(compiled("causal", str(tmp_path / "own"), {"slices": 5}, "inductor")[0], wanted)


def test_light_recomputation_is_refused_beside_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="torch_compile=True does not go with this: recompute='light'"):
        causal(str(tmp_path), {"slices": 5, "recompute": "light"}, torch_compile=True)
    plan = Plan.uniform(batch_size=4, seq_len=40, num_slices=2, boundaries=(0, 4), recompute="light")
    with pytest.raises(ValueError, match="torch_compile=True does not go with this: recompute='light'"):
        causal(str(tmp_path), {"plan": plan}, torch_compile=True)


def test_planners_do_not_choose_light_recomputation() -> None:
    """It was refused in the first step that the planner chose it for."""
    decoder = Decoder(model())
    assert "light" in spec_of(decoder, compiled=False).recompute_modes
    compiled = spec_of(decoder, compiled=True)
    assert "light" not in compiled.recompute_modes
    assert not compiled.fused_grads
