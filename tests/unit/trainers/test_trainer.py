"""transformers' Trainer through a pipeline: the curves and weights of the plain one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.ranks import Ranks
from tests.unit.trainers.runs import Run, causal, model, tuned

METRICS = ("entropy", "mean_token_accuracy", "rewards/margins", "logps/chosen", "reward", "completions/mean_length")
pytestmark = pytest.mark.usefixtures("quiet_models")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return causal(str(tmp_path_factory.mktemp("plain")), None)


def check(found: Run, wanted: Run, bound: float = 1e-6) -> None:
    """Transformers computes losses in float32."""
    for name in ("loss", "grad_norm", "eval_loss", "learning_rate", *METRICS):
        if name not in {key for entry in wanted.logs for key in entry}:
            continue
        assert wanted.column(name)
        assert found.column(name) == pytest.approx(wanted.column(name), rel=bound, abs=bound), name
    largest = max(w.abs().max().item() for w in wanted.weights.values())
    assert found.weights.keys() == wanted.weights.keys()
    for name, truth in wanted.weights.items():
        assert (found.weights[name] - truth).abs().max().item() / largest < 10 * bound, name


def test_slices_on_one_device(plain: Run, tmp_path: Path) -> None:
    check(causal(str(tmp_path), {"slices": 5}), plain)


def test_two_stages(plain: Run, tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2)(causal, str(tmp_path), {"slices": 5}):
        check(found, plain)
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float64)
    check(Run(plain.logs, dict(saved.named_parameters())), plain)


def test_replicas_of_two_stages(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """As two processes of the plain trainer, with DistributedDataParallel."""
    wanted = ranks(2)(causal, str(tmp_path / "plain"), None)[0]
    drawn = partial(model, own_weights=1)  # of which those of the first process count, as there
    for found in ranks(4)(partial(causal, model=drawn), str(tmp_path / "own"), {"slices": 5, "dp": 2}):
        check(found, wanted)


@pytest.mark.parametrize(
    ("size", "own"),
    [(2, {"slices": 5, "dp": 2}), pytest.param(4, {"slices": 5, "dp": 2}, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_replicas_with_a_loss_of_outputs(
    tmp_path: Path, ranks: Callable[[int], Ranks], size: int, own: dict[str, int]
) -> None:
    """TRL's loss is a mean over replicas, while pipelines sum their gradients."""
    wanted = ranks(2)(tuned, "sft", str(tmp_path / "plain"), None)[0]
    for found in ranks(size)(tuned, "sft", str(tmp_path / "own"), own):
        check(found, wanted, 1e-5)


@pytest.mark.exhaustive
def test_other_losses(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """Label smoothing needs logits: computed by transformers' own code, the same on every rank."""
    wanted = causal(str(tmp_path / "plain"), None, label_smoothing_factor=0.1)
    check(causal(str(tmp_path / "one"), {"slices": 5}, label_smoothing_factor=0.1), wanted)
    for found in ranks(2)(partial(causal, label_smoothing_factor=0.1), str(tmp_path / "two"), {"slices": 5}):
        check(found, wanted)


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trl(tmp_path: Path, ranks: Callable[[int], Ranks], kind: str) -> None:
    """TRL computes log-probabilities in float32, of which DPO's losses are differences."""
    wanted, bound = tuned(kind, str(tmp_path / "plain"), None), 1e-4 if kind == "dpo" else 1e-5
    one = tuned(kind, str(tmp_path / "one"), {"slices": 5})
    for found in (one, *ranks(2)(tuned, kind, str(tmp_path / "two"), {"slices": 5})):
        check(found, wanted, bound)
        if kind == "dpo":  # policy and reference are still the same, to the bit: nobody wins
            assert found.column("rewards/accuracies")[0] == wanted.column("rewards/accuracies")[0] == 0.0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "own"), [(1, {"slices": 7}), (2, {"slices": 7}), (4, {"slices": 7, "dp": 2})], ids=str
)
def test_fifty_steps(tmp_path: Path, ranks: Callable[[int], Ranks], size: int, own: dict[str, int]) -> None:
    run = partial(causal, max_steps=50, learning_rate=3e-3)
    plain = [run(str(tmp_path / "plain"), None)] if size < 4 else ranks(2)(run, str(tmp_path / "plain"), None)
    found = [run(str(tmp_path / "own"), own)] if size == 1 else ranks(size)(run, str(tmp_path / "own"), own)
    assert len(plain[0].column("loss")) == 50
    for each in found:
        check(each, plain[0], 1e-5)
