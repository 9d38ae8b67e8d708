"""The public names and the command line's verbs and options, frozen: a change here is a change for users."""

import ast
import re
from pathlib import Path

import pytest

import terapipe
from terapipe import hf, losses, trainers
from terapipe.planning.options import CostOptions, PlanOptions, names_of
from tests.support.commands import options_of_verbs

ROOT = Path(__file__).parents[2]
NAMES = """Action AuxiliaryLoss Cluster ClusterComparison Comparison CostTable DocumentPlanner DryRun Event GPT
GPTConfig Layout ModelSpec ORDERS Op Order PRESETS Pipeline PipelineError PipelineModel Plan PlanEstimate
PlanResult Profile Rival Schedule Slice SliceCache Stage Timeline Verification attend balance calibrate
compare compare_clusters dependencies device_mesh document_planner dry_run estimate fill_batch longest
next_token_labels plan profile register schedule simulate split_layers validate verify"""
LOSSES = """HiddenLoss SequenceLoss classification cross_entropy distillation dpo grpo interleave kto last_tokens orpo
ppo_clip reward_pairs sequence_mean simpo token_log_probs"""
HF = "Decoder UnsupportedModelError save_adapter save_pretrained split_layers"
TRAINERS = "PipelineConfig PipelineMixin PipelineTrainer PipelinedModel pipelined"
# Knobs are declared in planning/options.py, and a new one is one line there: they are not listed a second time.
KNOBS = {
    kind: " ".join(f"--{name.replace('_', '-')}" for name in names_of(kind)) for kind in (CostOptions, PlanOptions)
}
SOURCE = f"--model --cluster --profile {KNOBS[CostOptions].replace('--devices', '')}"
REQUEST = f"--batch-size --seq-len {KNOBS[PlanOptions]} --no-shard --no-offload-kv"  # the planner may choose to shard
LAUNCH = "--script --endpoint --name --slurm --kubernetes --image"
VERBS = {
    "doctor": "--ranks --port --timeout --json --prove --size --out",
    "train": "--print-config",
    "profile": "--model --dtype --seq-len --ranks --sizes --seconds --out",
    "calibrate": "--cluster --seconds --out",
    "plan": f"{SOURCE} --cost-table {REQUEST} {LAUNCH} --json --longest --sensitivity --save --dry-run",
    "compare": f"{SOURCE} {REQUEST} --same-layout --tokens --price --json --html --svg --png",
    "simulate": f"{SOURCE} {REQUEST} --measured --emulate --html --svg --png --trace --width --json",
    "reproduce": None,
    "verify": "--all --stages --num-slices --tp --device --json",
    "models": "--json",
}


def test_public_names() -> None:
    assert set(terapipe.__all__) == set(NAMES.split())
    assert set(losses.__all__) == set(LOSSES.split())
    assert set(hf.__all__) == set(HF.split())
    assert set(trainers.__all__) == set(TRAINERS.split())


@pytest.mark.parametrize("name", terapipe.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    found = getattr(terapipe, name)
    if not isinstance(found, dict):
        assert found.__doc__, f"{name} has no docstring"


def options() -> dict[str, set[str]]:
    return {
        name: {o for a in actions for o in a.option_strings if o.startswith("--")} - {"--help"}
        for name, actions in options_of_verbs().items()
    }


def test_verbs_and_options() -> None:
    found = options()
    assert set(found) == set(VERBS)
    for verb, wanted in VERBS.items():
        if wanted is not None:
            assert found[verb] == set(wanted.split()), verb


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_documentation_imports_public_names_only(page: Path) -> None:
    assert [line for code in python_blocks(page) for line in deep_imports(code)] == []


EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_import_public_names_only(path: Path) -> None:
    assert deep_imports(path.read_text()) == []


def deep_imports(code: str) -> list[str]:
    """Modules below the packages, which say in ``__all__`` what is public; but for those that need more than their
    package does."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    public = ("terapipe.training.config", "terapipe.trainers.trl")
    return [m for m in modules if m.startswith("terapipe.") and m.count(".") > 1 and m not in public]


def test_deep_imports_are_seen() -> None:
    assert deep_imports("from terapipe.runtime.pipeline import Pipeline\nimport terapipe.hf") == [
        "terapipe.runtime.pipeline"
    ]
