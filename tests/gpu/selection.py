"""Which tests run on pretend GPUs: those that are about them, and some of the other suites."""

from pathlib import Path

HERE = Path(__file__).parent
FIRST = "tests/gpu/test_proof.py"  # takes longest
FILES = (
    FIRST,
    "tests/failures/test_failures.py",
    "tests/unit/training/test_run.py",
    "tests/unit/runtime/test_layouts.py",
    "tests/exactness/test_layouts.py",
    "tests/unit/runtime/test_hf_layouts.py",
    "tests/exactness/test_transparency.py",
    "tests/unit/runtime/test_checkpoint.py",
    "tests/unit/runtime/test_warm_up.py",
    "tests/unit/runtime/test_autocast.py",
    "tests/exactness/test_documents.py",
    "tests/unit/runtime/test_auxiliary.py",
    *(f"tests/gpu/{path.name}" for path in sorted(HERE.glob("test_*.py")) if path.name not in FIRST),
)

# Others show the same, faster. Only `make test-all` runs these on pretend GPUs.
SELDOM = (
    r"tests/failures/test_failures\.py::test_replicas_and_parts_stop_too\[(die|stick|raise-layout[01])",
    r"tests/failures/test_failures\.py::test_an_exception_stops_all_ranks_with_that_ranks_error",
    r"tests/unit/runtime/test_checkpoint\.py::test_(killed_while_saving|masters_load|ranks_have_tensors|a_full_disk)",
    r"tests/unit/runtime/test_checkpoint\.py::test_a_save_in_the_background.*dp 2 x pp 1 x tp 2",
    r"tests/unit/runtime/test_hf_layouts\.py::.*(bert|llama-layout5|gpt2-layout9)",
    r"tests/unit/training/test_run\.py::(?!test_the_curve)",
    r"tests/gpu/test_measuring\.py::test_the_doctor",
    r"tests/gpu/test_transport\.py::test_steps_may_be_longer",
    r"tests/unit/runtime/test_layouts\.py::test_training_is_the_same.*(pp 2 x tp 2|pp 3)",
    r"tests/unit/runtime/test_layouts\.py::test_(shared_state|replicas_may)",
    r"tests/exactness/test_layouts\.py::.*dp 2 x pp 2 x tp 2",
    r"tests/exactness/test_layouts\.py::.*pp 3 x tp 2",
    r"tests/unit/runtime/test_warm_up\.py::test_all_ranks_compile",
    r"tests/unit/runtime/test_auxiliary\.py::test_a_term.*(deferred|dp 2 x pp 1 x tp 1-batch)",
    r"tests/gpu/test_models\.py::test_half_precision_is_as_good_as_the_cpus\[gpt2",
    r"tests/gpu/test_attention\.py::test_windows_need_no_more_memory\[cuda-dtype2",
    r"tests/gpu/test_attention\.py::test_windows_need_no_more_memory\[cpu",
    r"tests/gpu/test_models\.py::test_gradients_of_hugging_face_models_are_the_cpus\[(qwen3_moe|mixtral|gemma2)",
    r"tests/gpu/test_trainer\.py::test_the_trainer_with_bf16_on_several_gpus\[4-own2",
    r"tests/unit/runtime/test_autocast\.py::test_(float64|this_file|layers_that|hidden_states.*(True|terapipe-v)|nothing.*zb)",
    r"tests/unit/runtime/test_autocast\.py::test_(values_of_tokens.*llama|replicas_and_tensor_parallel.*layout0)",
    r"tests/unit/runtime/test_autocast\.py::test_(gradients_are|recomputation).*llama",
    r"tests/exactness/test_documents\.py::test_(every_batch_is_cut_by_its_documents\[(1f1b|both)|five_documents)",
    r"tests/unit/runtime/test_layouts\.py::test_training_is_the_same.*dp 2 x pp 2 x tp 1-sharded",
)
