"""`terapipe train` with objectives: the curve is that of a loop in plain PyTorch; metrics are written and drawn."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terapipe import GPT
from terapipe.modeling.stage import IGNORE
from terapipe.planning.presets import gpt_config
from terapipe.training.config import RunConfig, parse
from terapipe.training.data.loader import Batches, Pairs, Sequences
from terapipe.training.data.token_file import open_data
from terapipe.training.logging.metrics import read
from tests.support.ranks import Ranks
from tests.unit.training.loop import curve
from tests.unit.training.test_run import losses, train

SHAPE = "layers=3,hidden=16,heads=2,vocab=257"
STEPS = 4
WORDS = "the quick brown fox jumps over the lazy dog while nine wizards box and quack"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objectives")
    rows = []
    for i in range(12):
        prompt, good, bad = (WORDS[5 * (i + k) % 40 :][: 9 + 4 * k] for k in range(3))
        rows.append({"text": f"{prompt} {good}", "prompt": prompt, "chosen": good, "rejected": bad, "weight": i / 4})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "own.py").write_text(
        "import torch.nn.functional as F\n"
        "def focal(logits, labels):\n"
        "    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='none')\n"
        "    return ((1 - (-losses).exp()) * losses).sum()\n"
    )
    return folder


def config(place: Path, name: str, *replaced: str) -> RunConfig:
    return parse(
        f"""
[model]
preset = "{SHAPE}"
dtype = "float64"
[data]
train = "{place / "rows.jsonl"}"
seq_len = 40
batch_size = 4
packing = "padded"
[plan]
seconds = 0
[optimizer]
steps = {STEPS}
accumulate = 2
lr = 0.01
eps = 1e-4
[lr]
warmup = 2
[checkpoints]
every = 0
[evaluation]
every = 2
sample = 0
[logging]
folder = "{place / name}"
""",
        replaced,
    )


def plain_curve(told: RunConfig, rows: Batches, loss_of: Callable[[GPT, Sequences], Tensor]) -> list[float]:
    return curve(told, GPT(gpt_config(SHAPE)).double(), rows, STEPS, loss_of)


def log_probs(gpt: GPT, rows: Sequences) -> Tensor:
    all_of_them = torch.log_softmax(gpt.logits(gpt(rows.ids)), -1)
    return all_of_them.gather(-1, rows.labels.clamp(min=0)[..., None]).squeeze(-1) * (rows.labels != IGNORE)


def plain_dpo(gpt: GPT, rows: Sequences) -> Tensor:
    with torch.no_grad():
        reference = log_probs(GPT(gpt_config(SHAPE)).double(), rows).sum(1)
    ratios = log_probs(gpt, rows).sum(1) - reference
    return -F.logsigmoid(0.3 * (ratios[0::2] - ratios[1::2])).mean()


def plain_weighted(gpt: GPT, rows: Sequences) -> Tensor:
    assert rows.weights is not None
    return -(log_probs(gpt, rows) * rows.weights).sum() / (rows.labels != IGNORE).sum()


def plain_focal(gpt: GPT, rows: Sequences) -> Tensor:
    found = -log_probs(gpt, rows)
    return ((1 - (-found).exp()) * found).sum() / (rows.labels != IGNORE).sum()


KINDS: dict[str, tuple[tuple[str, ...], Any]] = {
    "dpo": (("objective.kind=dpo", "objective.beta=0.3", "objective.prompt=prompt"), plain_dpo),
    "weights": (("objective.weights=weight",), plain_weighted),
    "own": (("objective.kind={place}/own.py:focal",), plain_focal),
}
LAYOUTS = ((1, ()), (3, ("plan.slice_lengths=[9,1,14,16]", "plan.microbatch_size=2")))


@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_is_that_of_a_plain_loop(ranks: Callable[[int], Ranks], place: Path, kind: str) -> None:
    options, loss_of = KINDS[kind]
    options = tuple(option.format(place=place) for option in options)
    for size, layout in LAYOUTS:
        told = config(place, f"{kind}-{size}", *options, *layout, f"plan.pp={size}", f"data.eval={place}/rows.jsonl")
        ranks(size)(train, told)
        data = open_data(told.data, told.folder / "data")
        make = Pairs if kind == "dpo" else Batches
        wanted = plain_curve(told, make(data.train, 40, "padded", True, 0, kind == "weights"), loss_of)
        assert losses(told.folder) == pytest.approx(wanted, rel=1e-9)
        assert all("eval_loss" in row for row in read(told.folder) if row.get("perplexity"))


def test_metrics_are_written_and_drawn(ranks: Callable[[int], Ranks], place: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = config(place, "drawn", *KINDS["dpo"][0])
    ranks(1)(train, told)
    margins = [row["metrics"]["rewards/margins"] for row in read(told.folder) if "metrics" in row]
    assert margins[0] == pytest.approx(0.0, abs=1e-12)  # the model is the reference
    assert margins[-1] > 0
    events = EventAccumulator(str(told.folder / "tensorboard")).Reload()
    assert "objective/rewards/margins" in events.Tags()["scalars"]
    assert "rewards/margins" in (told.folder / "report.html").read_text()


def test_the_reference_stays_when_a_run_goes_on(ranks: Callable[[int], Ranks], place: Path) -> None:
    whole = config(place, "dpo-whole", *KINDS["dpo"][0])
    ranks(1)(train, whole)
    parts = config(place, "dpo-parts", *KINDS["dpo"][0])
    ranks(1)(train, parts, 2)
    assert len(losses(parts.folder)) == 2
    ranks(1)(train, parts)
    assert losses(parts.folder) == pytest.approx(losses(whole.folder), rel=1e-12)


def test_the_reference_is_what_training_begins_with(ranks: Callable[[int], Ranks], place: Path) -> None:
    """From another run's checkpoint: its model, not the one that was drawn; and the data from the beginning."""
    tuned = config(place, "tuned", "data.batch_size=3", "optimizer.accumulate=1", "optimizer.steps=1")
    ranks(1)(train, tuned)
    start = next((tuned.folder / "checkpoints").glob("step-*"))
    told = config(place, "from-tuned", *KINDS["dpo"][0], f"checkpoints.resume={start}", "optimizer.steps=3")
    ranks(1)(train, told)
    first = next(row for row in read(told.folder) if "loss" in row)
    assert first["loss"] == pytest.approx(0.6931471805599453, rel=1e-9)
    assert first["metrics"]["rewards/margins"] == pytest.approx(0.0, abs=1e-9)


def test_a_damaged_reference_is_computed_again(ranks: Callable[[int], Ranks], place: Path) -> None:
    told = config(place, "damaged", *KINDS["dpo"][0])
    ranks(1)(train, told, 2)
    path = told.folder / "reference-train.npz"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    ranks(1)(train, told)
    assert len(losses(told.folder)) == STEPS


def test_sequences_are_evaluated_in_whole_batches(ranks: Callable[[int], Ranks], place: Path) -> None:
    """Rows that fill up a batch would count as sequences."""
    (place / "mean.py").write_text("from terapipe import losses\nmean = losses.sequence_mean()\n")
    lines = (place / "rows.jsonl").read_text().splitlines()
    (place / "five.jsonl").write_text("\n".join(lines[:5]))
    (place / "four.jsonl").write_text("\n".join(lines[:4]))
    found = []
    for name in ("five", "four"):
        told = config(place, name, f"objective.kind={place}/mean.py:mean", f"data.eval={place}/{name}.jsonl")
        ranks(1)(train, told)
        found.append([row["eval_loss"] for row in read(told.folder) if "eval_loss" in row])
    assert found[0] == found[1]


def teacher(folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).double()
    made.save_pretrained(folder)
    return made


def train_counting_transports(told: RunConfig) -> int:
    """How often a run with a teacher meets the other ranks."""
    from terapipe.runtime.comm.transport import Transport

    made: list[Transport] = []
    plain = Transport.__init__

    def count(self: Transport, *parts: Any) -> None:
        made.append(self)
        plain(self, *parts)

    with mock.patch.object(Transport, "__init__", count):
        train(told)
    return len(made)


@pytest.mark.usefixtures("quiet_models")
def test_distillation(ranks: Callable[[int], Ranks], place: Path) -> None:
    whole = teacher(place / "teacher").eval()

    def plain(gpt: GPT, rows: Sequences) -> Tensor:
        counted = rows.labels != IGNORE
        logits = gpt.logits(gpt(rows.ids))[counted]
        with torch.no_grad():
            taught = torch.softmax(whole(input_ids=rows.ids).logits[counted] / 2, -1)
        soft = F.kl_div(torch.log_softmax(logits / 2, -1), taught, reduction="batchmean") * 4
        return 0.7 * soft + 0.3 * F.cross_entropy(logits, rows.labels[counted])

    options = ("objective.kind=distill", f"objective.teacher={place}/teacher", "objective.temperature=2.0")
    told = config(place, "distilled", *options, "objective.alpha=0.7", "plan.pp=2", "plan.num_slices=3")
    assert ranks(2)(train_counting_transports, told) == [1, 1], "one Transport per process, for student and teacher"
    data = open_data(told.data, told.folder / "data")
    assert losses(told.folder) == pytest.approx(
        plain_curve(told, Batches(data.train, 40, "padded", True, 0), plain), rel=1e-6
    )


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (("objective.kind=dop",), "unknown objective.kind 'dop'; did you mean 'dpo'?"),
        (("objective.kind=distill",), "needs objective.teacher, the folder"),
        (("objective.kind=dpo", "data.packing=concat"), "pairs need data.packing = 'padded'"),
        (("objective.kind=dpo", "data.batch_size=3"), "pairs need an even data.batch_size"),
        (("objective.weights=w", "data.packing=concat"), "objective.weights are of documents"),
        (("objective.beta=0.2",), "objective.beta is for kind = dpo, got 'cross_entropy'; leave it out"),
        (("objective.kind=dpo", "objective.z_loss=0.2"), "objective.z_loss is for kind = cross_entropy"),
    ],
)
def test_bad_configurations(place: Path, replaced: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(place, "bad", *replaced)


@pytest.mark.parametrize(
    ("line", "replaced", "message"),
    [
        ('{"chosen": "a", "rejected": 3}', ("objective.kind=dpo",), "line 1: 'rejected' must hold text, got 3"),
        ('{"chosen": "a"}', ("objective.kind=dpo",), "line 1: every line must have the field 'rejected'"),
        ('{"text": "a", "w": -1}', ("objective.weights=w",), "line 1: 'w' must be a number of at least 0, got -1"),
    ],
)
def test_bad_entries(tmp_path: Path, line: str, replaced: tuple[str, ...], message: str) -> None:
    from terapipe.training.data.prepare import prepare

    (tmp_path / "rows.jsonl").write_text(line)
    told = config(tmp_path, "bad", *replaced)
    with pytest.raises(ValueError, match=message):
        prepare(told.data, tmp_path / "data", objective=told.objective)


@pytest.mark.parametrize(
    ("seq_len", "ids", "labels"),
    [
        (6, "aabc\0.", ".bc\0.."),  # the end token is predicted, the prompt is not; the rest is padding
        (4, "aabc", ".bc\0"),
        (3, "abc", "bc\0"),  # the beginning of the prompt is dropped first
        (2, "ab", "bc"),  # ... then the end
    ],
)
def test_rows_of_pairs(tmp_path: Path, seq_len: int, ids: str, labels: str) -> None:
    from terapipe.training.data.prepare import prepare

    (tmp_path / "rows.jsonl").write_text('{"prompt": "aa", "chosen": "bc", "rejected": "de"}')
    told = config(tmp_path, "rows", *KINDS["dpo"][0])
    prepare(told.data, tmp_path / "data", objective=told.objective)
    file = open_data(told.data, tmp_path / "data").train
    rows = Pairs(file, seq_len, "padded", False, 0).read(0, 2)
    known = {"\0": 256, ".": 0}
    assert rows.ids[0].tolist() == [known.get(c, ord(c)) for c in ids]
    assert rows.labels[0].tolist() == [known.get(c, ord(c)) or IGNORE for c in labels]
    assert rows.labels[1].tolist() == [{98: 100, 99: 101}.get(x, x) for x in rows.labels[0].tolist()]
    assert rows.indices == (0, 1)


@pytest.mark.parametrize(
    ("packing", "weights"),
    [("padded", [[0.5, 0.5, 1.0, 1.0], [2.0, 2.0, 2.0, 1.0]]), ("packed", [[0.5, 0.5, 2.0, 2.0]])],
)
def test_weights_of_rows(tmp_path: Path, packing: Any, weights: list[list[float]]) -> None:
    """Of the token to predict: documents "ab" and "cde", each with an end token."""
    from terapipe.training.data.prepare import prepare

    (tmp_path / "rows.jsonl").write_text('{"text": "ab", "w": 0.5}\n{"text": "cde", "w": 2}')
    told = config(tmp_path, "rows", "objective.weights=w", f"data.packing={packing}", "data.seq_len=4")
    prepare(told.data, tmp_path / "data", objective=told.objective)
    rows = Batches(open_data(told.data, tmp_path / "data").train, 4, packing, False, 0, weighted=True)
    found = rows.read(0, len(rows))
    assert found.weights is not None
    assert found.weights.tolist() == weights


def test_the_prompt_is_what_both_begin_with(tmp_path: Path) -> None:
    from terapipe.training.data.prepare import prepare

    (tmp_path / "rows.jsonl").write_text('{"chosen": "aabc", "rejected": "aad"}')
    told = config(tmp_path, "rows", "objective.kind=dpo")
    prepare(told.data, tmp_path / "data", objective=told.objective)
    assert open_data(told.data, tmp_path / "data").train.numbers.tolist() == [2.0, 2.0]


def test_too_few_pairs_for_evaluation(place: Path) -> None:
    (place / "few.jsonl").write_text('{"chosen": "a b", "rejected": "a c", "prompt": "p"}')
    told = config(place, "few", *KINDS["dpo"][0], f"data.eval={place}/few.jsonl")
    with pytest.raises(ValueError, match=r"evaluated on whole batches of 4 sequences .*, got 2"):
        train(told)


def test_pairs_need_even_microbatches(place: Path) -> None:
    told = config(place, "odd", *KINDS["dpo"][0], "plan.microbatch_size=1")
    with pytest.raises(ValueError, match="the two texts of a pair must be in one microbatch"):
        train(told)
