"""8-bit optimizers through a pipeline: weights as those of the plain trainer, and checkpoints in any layout."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from terapipe.trainers.refusals import optimizer_of, refuse_arguments
from tests.support.ranks import Ranks
from tests.unit.trainers import runs
from tests.unit.trainers.test_trainer import check

pytestmark = pytest.mark.usefixtures("quiet_models")


def model() -> Any:
    """Wide enough that torchao quantizes the states of its products: those of 4096 numbers and more."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).double()


def trained(folder: str, own: dict[str, Any] | None, resume: str | None = None, **changes: Any) -> runs.Run:
    """torchao compiles its update, which takes long and changes nothing but the time."""
    compiled = torch.compile
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    changes = {"optim": "adamw_torch_8bit", "learning_rate": 2e-3, "max_steps": 4} | changes
    try:
        return runs.causal(folder, own, resume, model=model, **changes)
    finally:
        torch.compile = compiled


def test_torchao(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """A run of one process goes on in two stages: states are saved by parameter, as codes and scales."""
    wanted = trained(str(tmp_path / "plain"), None)
    saves = {"save_strategy": "steps", "save_steps": 2}
    one = trained(str(tmp_path / "one"), {"slices": 5}, **saves)
    check(one, wanted)
    checkpoint = str(tmp_path / "one/checkpoint-2")
    for found in ranks(2)(trained, str(tmp_path / "two"), {"slices": 5}, checkpoint):
        check(runs.Run([], found.weights), runs.Run([], wanted.weights))


@pytest.mark.exhaustive
def test_bitsandbytes(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """In float32, the only dtype that it takes here: rounding may flip a code, which moves a weight by a few percent
    of its update."""
    options = {"optim": "adamw_bnb_8bit", "model": partial(_single)}
    wanted = runs.causal(str(tmp_path / "plain"), None, **options)
    for found in ranks(2)(partial(runs.causal, **options), str(tmp_path / "two"), {"slices": 5}):
        check(runs.Run([], found.weights), runs.Run([], wanted.weights), 1e-3)


def _single() -> Any:
    return model().float()


class _Arguments:
    """Of a trainer, as far as it is asked."""

    def __init__(self, optim: str) -> None:
        self.optim = optim
        self.load_best_model_at_end = self.save_only_model = False
        self.train_sampling_strategy = "random"


def test_quantized_states_want_whole_parameters() -> None:
    from terapipe.planning.layout import Layout

    trainer = SimpleNamespace(args=_Arguments("adamw_8bit"))
    with pytest.raises(ValueError, match=r"optim='adamw_8bit' does not go with dp 2 \(sharded\) x pp 1 x tp 1"):
        refuse_arguments(trainer, Layout(2, 1, 1, shard=True))


@pytest.mark.parametrize(
    ("optim", "name"),
    [("paged_adamw_8bit", "adamw-8bit"), ("adamw_torch_fused", "adamw"), ("sgd", "sgd"), ("adafactor", "adamw")],
)
def test_states_that_count_within_a_budget(optim: str, name: str) -> None:
    assert optimizer_of(SimpleNamespace(args=_Arguments(optim))) == name
