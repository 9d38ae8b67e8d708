"""NEFTune in slices: losses and weights of the plain trainer, with the same noise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Ranks
from tests.unit.trainers.runs import Run, causal, tuned
from tests.unit.trainers.test_trainer import check

pytestmark = pytest.mark.usefixtures("quiet_models")
NOISY = {"neftune_noise_alpha": 20.0, "max_steps": 3}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return causal(str(tmp_path_factory.mktemp("plain")), None, **NOISY)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_same_draws_on_one_device(plain: Run, tmp_path: Path, checkpointing: bool) -> None:
    """Evaluations between steps have no noise. Slices that are computed again have that of the first time."""
    check(causal(str(tmp_path), {"slices": 5}, **NOISY, gradient_checkpointing=checkpointing), plain)


def test_noise_counts(plain: Run, tmp_path: Path) -> None:
    still = causal(str(tmp_path), {"slices": 5}, max_steps=3)
    assert abs(still.column("loss")[0] - plain.column("loss")[0]) > 1e-4


def with_known_noise(kind: str, folder: str, own: dict[str, Any] | None) -> Run:
    """Draws that depend on place and size only: ranks and microbatches draw in another order than one process."""
    drawn = Tensor.uniform_

    def uniform(x: Tensor, low: Any = 0.0, high: Any = 1.0, **named: Any) -> Tensor:
        if x.ndim != 3:
            return drawn(x, low, high, **named)
        wave = torch.sin(torch.arange(x[0].numel(), dtype=x.dtype)).view_as(x[0])
        return x.copy_(wave * float(high))

    Tensor.uniform_ = uniform  # type: ignore[method-assign]
    try:
        if kind == "causal":
            return causal(folder, own, **NOISY)
        return tuned(kind, folder, own, **NOISY, gradient_checkpointing=own is not None)
    finally:
        Tensor.uniform_ = drawn  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["causal", "sft"])
def test_two_stages(kind: str, tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """The first stage draws, of the size that belongs to whole sequences."""
    wanted = with_known_noise(kind, str(tmp_path / "plain"), None)
    for found in ranks(2)(with_known_noise, kind, str(tmp_path / "two"), {"slices": 5}):
        check(found, wanted, 1e-6 if kind == "causal" else 1e-5)


def test_text_is_generated_without_noise_so_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neftune_noise_alpha=20.0 does not go .* a trainer that generates none"):
        tuned("grpo", str(tmp_path), {"slices": 5}, neftune_noise_alpha=20.0)
