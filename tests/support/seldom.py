"""Slow tests that only `make test-all` runs, because others show the same, faster."""

import re
from collections.abc import Iterable

import pytest

SELDOM = (
    r"tests/unit/training/test_run\.py::test_going_on_in_another_layout",
    r"tests/unit/published/test_reproduce\.py::test_what_if_cases",
    r"tests/unit/modeling/test_kernels\.py::test_flex_attention_by_its_own_definition\[(16-softcap|128-causal)",
    r"tests/unit/modeling/test_kernels\.py::test_flex_attention_by_its_own_definition\[128-softcap",
    r"tests/exactness/test_layouts\.py::test_tokens_shared_out.*dp 2 x pp 2 x tp 2",
    r"tests/unit/cli/test_doctor\.py::test_two_ranks_of_this_machine_can_train",
    r"tests/unit/runtime/test_warm_up\.py::test_all_ranks_compile_at_the_same_time",
    r"tests/unit/runtime/test_checkpoint\.py::test_a_save_in_the_background.*dp 2 x pp 1 x tp 2",
    r"tests/unit/runtime/test_dry_run\.py::test_bytes_of_a_rank_of_gpt3_13b.*\[2-options2",
    r"tests/unit/runtime/test_autocast\.py::test_float64_is_left_alone\[llama",
    r"tests/failures/test_hosts\.py::test_a_slow_link_is_measured",
    r"tests/unit/modeling/test_compiling\.py::test_gradients_are_the_plain_models\[terapipe-deferred",
    r"tests/unit/runtime/test_layouts\.py::test_training_is_the_same.*dp 2 x pp 2 x tp 1-sharded",
    r"tests/unit/training/test_run\.py::test_asked_to_stop.*\[1\]",
    r"tests/unit/runtime/test_dry_run\.py::test_bytes_of_a_rank_of_gpt3_13b.*\[1-options1",
    r"tests/unit/runtime/test_mesh\.py::test_dimensions_of_a_mesh_may_have_any_name\[\('replicate', 'tensor'",
    r"tests/exactness/test_layouts\.py::test_every_layout_in_every_order\[dp 2 x pp 2 x tp 2",
    r"tests/exactness/test_objectives_hf\.py::test_balance_of_each_microbatch.*(qwen3_moe|olmoe)",
    r"tests/unit/runtime/test_logits\.py::test_logits_are_the_plain_models.*dp 1 x pp 1 x tp 2",
    r"tests/unit/modeling/test_kernels\.py::test_flex_attention_by_its_own_definition\[16-window",
    r"tests/unit/search/test_choose\.py::test_counting_memory_first_changes_no_choice\[536870912",
    r"tests/exactness/test_documents_hf\.py::test_windows_and_chunks_begin_anew.*(mistral|gemma2)",
    r"tests/unit/runtime/test_module\.py::test_torchs_state_dict_functions_round.*terapipe-dp 2 x pp 1 x tp 1-False",
)


def mark_seldom(items: Iterable[pytest.Item], names: Iterable[str] = SELDOM) -> None:
    for item in items:
        if any(re.match(name, item.nodeid) for name in names):
            item.add_marker(pytest.mark.exhaustive)
