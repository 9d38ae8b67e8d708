"""Which files of tests run on pretend GPUs: those that are about them, and some of the other suites.

Only `make test-all` runs the tests there that are marked `gpu_seldom`, because others show the same, faster.
"""

from pathlib import Path

HERE = Path(__file__).parent
FIRST = "tests/gpu/test_proof.py"  # takes longest
FILES = (
    FIRST,
    "tests/failures/test_failures.py",
    "tests/unit/training/test_run.py",
    "tests/unit/runtime/test_layouts.py",
    "tests/exactness/test_layouts.py",
    "tests/exactness/test_offload.py",
    "tests/unit/runtime/test_hf_layouts.py",
    "tests/exactness/test_transparency.py",
    "tests/exactness/test_bare_ends.py",
    "tests/unit/runtime/test_checkpoint.py",
    "tests/unit/runtime/test_reader.py",
    "tests/unit/runtime/test_writer.py",
    "tests/unit/runtime/test_warm_up.py",
    "tests/unit/runtime/test_calibration.py",
    "tests/unit/runtime/test_autocast.py",
    "tests/exactness/test_documents.py",
    "tests/unit/runtime/test_auxiliary.py",
    *(f"tests/gpu/{path.name}" for path in sorted(HERE.glob("test_*.py")) if path.name not in FIRST),
)
