"""Every loss type and option that TRL's configurations offer, by trainer."""

from dataclasses import dataclass, field
from typing import Any

KINDS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward")
DEFAULTS = "defaults"  # arguments as they come, bfloat16 autocast included
DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
GRPO_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
COMMON: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.0}, {"pad_to_multiple_of": 8},
)  # fmt: skip
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "SFT": (
        {}, {"loss_type": "dft"}, {"loss_type": "chunked_nll"}, {"packing": True, "max_length": 48},
        {"packing": True, "max_length": 48, "packing_strategy": "wrapped"},
        {"packing": True, "max_length": 48, "packing_strategy": "bfd_split"},
        {"padding_free": True, "max_length": None},
        {"rows": "completions"}, {"rows": "completions", "completion_only_loss": False}, {"max_length": 16},
        {"label_smoothing_factor": 0.1}, {"shuffle_dataset": True}, {"average_tokens_across_devices": False}, *COMMON,
    ),
    "DPO": (
        *({"loss_type": [name]} for name in DPO_LOSSES[:3]), {"loss_type": ["exo_pair"], "label_smoothing": 0.1},
        *({"loss_type": [name]} for name in DPO_LOSSES[4:5]), {"loss_type": ["robust"], "label_smoothing": 0.1},
        *({"loss_type": [name]} for name in DPO_LOSSES[6:]),
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        *({"f_divergence_type": name} for name in ("forward_kl", "js_divergence", "alpha_divergence")),
        {"ld_alpha": 0.5}, {"use_weighting": True}, {"precompute_ref_log_probs": True}, {"padding_free": True},
        {"max_length": 16}, {"sync_ref_model": True, "ref_model_sync_steps": 1}, {"disable_dropout": False}, *COMMON,
    ),
    "KTO": (
        {}, {"loss_type": "apo_zero_unpaired"}, {"desirable_weight": 1.5, "undesirable_weight": 0.5},
        {"precompute_ref_log_probs": True}, {"max_length": 16}, {"sync_ref_model": True, "ref_model_sync_steps": 1},
        {"disable_dropout": False}, *COMMON,
    ),
    "GRPO": (
        *({"loss_type": name} for name in GRPO_LOSSES), {"beta": 0.1}, {"beta": 0.1, "use_bias_correction_kl": False},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"num_iterations": 2}, {"delta": 1.5},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"}, {"epsilon_high": 0.28},
        {"scale_rewards": "batch"}, {"scale_rewards": "none"}, {"mask_truncated_completions": True},
        {"top_entropy_quantile": 0.4}, {"entropy_coef": 0.05}, {"use_adaptive_entropy": True, "entropy_target": 9.0},
        {"off_policy_mask_threshold": 0.5, "num_iterations": 2}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"multi_objective_aggregation": "normalize_then_sum"}, {"steps_per_generation": 2},
        {"cast_lm_head_to_fp32": True}, {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
        {"disable_dropout": True}, *COMMON,
    ),
    "RLOO": (
        {}, {"beta": 0.0}, {"num_iterations": 2}, {"normalize_advantages": True}, {"reward_clip_range": (0.0, 3.0)},
        {"mask_truncated_completions": True}, {"epsilon_high": 0.28}, {"steps_per_generation": 2},
        {"temperature": 0.7}, {"sync_ref_model": True, "ref_model_sync_steps": 1}, *COMMON,
    ),
    "Reward": (
        {}, {"center_rewards_coefficient": 0.01}, {"rows": "margins"}, {"max_length": 24}, {"disable_dropout": False},
        *COMMON,
    ),
}  # fmt: skip
# Models whose configurations switch on something that others do not have.
MODELS = {
    "SFT": ("qwen3_moe", "gpt_oss", "qwen3_next", "gpt2", "gpt2_dropout"),
    "DPO": ("qwen3_moe",),
    "KTO": ("qwen3_moe",),
    "GRPO": ("qwen3_moe",),
    "RLOO": ("qwen3_moe",),
    "Reward": ("gpt2",),
}
CHANGES = ("router_aux_loss_coef", 0.0)


@dataclass(frozen=True)
class Case:
    """Arguments of a trainer. ``defaults``: all others are as they come; else small, so that curves differ visibly."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    adapter: bool = False
    checkpointing: bool = True
    stages: int = 1
    defaults: bool = False
    model: str = "llama"

    def __str__(self) -> str:
        given = " ".join(f"{name}={value}" for name, value in self.options.items())
        parts = (
            self.kind, self.model * (self.model != "llama"), DEFAULTS * self.defaults, given, "LoRA" * self.adapter,
            "" if self.checkpointing else "without checkpointing", f"{self.stages} stages" * (self.stages > 1),
        )  # fmt: skip
        return ", ".join(part for part in parts if part)


def all_cases(kinds: tuple[str, ...] = KINDS) -> list[Case]:
    found = []
    for kind in kinds:
        for adapter in (False, True):
            for stages in (1, 2):
                found.append(Case(kind, {}, adapter, True, stages, defaults=True))
                for checkpointing in (True, False):
                    found += [Case(kind, options, adapter, checkpointing, stages) for options in OPTIONS[kind]]
                found += [Case(kind, {}, adapter, True, stages, model=model) for model in MODELS[kind]]
                found += [
                    Case(kind, {CHANGES[0]: CHANGES[1]}, adapter, True, stages, model=model)
                    for model in MODELS[kind]
                    if model in ("qwen3_moe", "gpt_oss")
                ]
    return found
