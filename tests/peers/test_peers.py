"""A part of `make test-peers`: what people run, arguments as they come; the rest is exhaustive."""

from collections.abc import Callable

import pytest

from tests.peers.cases import KINDS, Case, all_cases
from tests.peers.report import EQUAL, REFUSED, WRONG, findings
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("quiet_models")
CASES = [case for case in all_cases() if case.defaults and (case.adapter or case.stages == 1)]


GENERATING = ("GRPO", "RLOO")  # the slowest; test_trainer.py trains one of them


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.exhaustive] * (kind in GENERATING)) for kind in KINDS]
)
def test_default_arguments(kind: str, ranks: Callable[[int], Ranks]) -> None:
    """With and without an adapter, with one also in two stages: bfloat16 and gradient checkpointing are on."""
    cases = [case for case in CASES if case.kind == kind]
    assert [finding for finding in findings(cases, ranks) if finding.kind != EQUAL] == []


@pytest.mark.parametrize(
    "case",
    [
        Case("DPO", {"loss_type": ["sigmoid"]}, adapter=True),
        Case("KTO", adapter=True),
        Case("GRPO", {"top_entropy_quantile": 0.4}),
        Case("Reward", {"center_rewards_coefficient": 0.01, "gradient_accumulation_steps": 2}),
    ],
    ids=str,
)
def test_in_float64(case: Case, ranks: Callable[[int], Ranks]) -> None:
    assert findings([case], ranks)[0].kind == EQUAL


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("SFT", model="qwen3_moe"), "router_aux_loss_coef=0.0"),
        (Case("DPO", model="qwen3_moe"), "router_aux_loss_coef=0.0"),
        (Case("SFT", model="qwen3_next"), "gradient_checkpointing=False"),
        (Case("GRPO", {"cast_lm_head_to_fp32": True}), "cast_lm_head_to_fp32"),
        (Case("SFT", model="gpt2_dropout"), "attn_pdrop"),
    ],
    ids=str,
)
def test_refused_when_the_trainer_is_made(case: Case, reason: str) -> None:
    finding = findings([case], Ranks)[0]
    assert finding.kind == REFUSED
    assert reason in finding.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_all(kind: str, ranks: Callable[[int], Ranks]) -> None:
    assert [finding for finding in findings(all_cases((kind,)), ranks) if finding.kind == WRONG] == []
