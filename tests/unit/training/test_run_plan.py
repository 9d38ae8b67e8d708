"""The plan of a run: from a file, from a profile, of equal slices; and batches cut by their own documents."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples import own_model
from terapipe import GPT, Layout, Plan, Profile, api
from terapipe.modeling.stage import IGNORE
from terapipe.planning import DocumentCosts, Sample
from terapipe.planning.presets import gpt_config
from terapipe.runtime.comm.environment import local_device
from terapipe.runtime.comm.transport import Transport
from terapipe.search.request import Request
from terapipe.search.result import PlanResult
from terapipe.training import run_plan
from terapipe.training.config import RunConfig, parse
from terapipe.training.data.loader import Batches, Sequences
from terapipe.training.data.token_file import open_data
from terapipe.training.logging.metrics import read
from terapipe.training.model import RunModel, make_model
from terapipe.training.run_plan import document_planner, from_file, ranks_wanted, request_key
from tests.support.ranks import Ranks
from tests.support.training_runs import PRESET, short_run
from tests.unit.training.loop import curve
from tests.unit.training.test_run import TEXT, losses, train


def test_train_takes_the_layout_of_a_saved_plan(tmp_path: Path) -> None:
    """It took the plan's ranks, and data and tensor from elsewhere."""
    file = tmp_path / "plan.json"
    plan = Plan.uniform(batch_size=1, seq_len=32, num_slices=2, boundaries=(0, 1, 2))
    file.write_text(PlanResult.of_plan(plan, Layout(2, 2, 2)).to_json())
    text = f'[model]\npreset="gpt-tiny"\n[data]\ntrain="x"\nseq_len=32\nbatch_size=2\n[plan]\nfile="{file}"'
    config = parse(text)
    assert ranks_wanted(config.plan) == 8
    found = from_file(config, 8)
    assert found is not None
    assert found.layout == Layout(2, 2, 2)
    with pytest.raises(ValueError, match=r"is for tp 2, plan.tp says 4"):
        ranks_wanted(parse(text, ["plan.tp=4"]).plan)
    with pytest.raises(ValueError, match=r"plan.order would have no effect beside plan.file"):
        ranks_wanted(parse(text, ["plan.order=gpipe"]).plan)
    with pytest.raises(ValueError, match="8 processes; there are 4"):
        from_file(config, 4)


class AskedError(Exception):
    """What the search was asked for."""


def request_of(config: RunConfig, made: RunModel, monkeypatch: pytest.MonkeyPatch) -> Request:
    def choose(source: object, request: Request, progress: object) -> None:
        raise AskedError(request)

    monkeypatch.setattr(api, "choose", choose)
    monkeypatch.setattr(api, "source_of", lambda *_: None)
    with pytest.raises(AskedError) as found:
        run_plan.from_profile(config, made, None, 12)  # type: ignore[arg-type]
    request: Request = found.value.args[0]
    return request


def test_the_search_knows_what_the_model_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search chose recomputation and slices that the model then refused; and slices that six devices cannot share
    out, so that they did not."""
    config = short_run(tmp_path, PRESET, "data.seq_len=2041", "plan.tp=6", "data.batch_size=4")
    able = make_model(config.model, config.data, 257)
    picky = replace(able, min_slice=2, recompute_modes=("none",))
    assert request_of(config, able, monkeypatch).recompute is None
    assert request_of(config, able, monkeypatch).tile_for(tile=8, tp=6) == 24
    one = replace(config, plan=replace(config.plan, tp=1))
    assert request_of(one, able, monkeypatch).tile_for(tile=8, tp=1) == 8
    assert request_of(one, picky, monkeypatch).tile_for(tile=8, tp=1) == 16, "the last slice had one token"
    assert request_of(one, picky, monkeypatch).recompute_modes == ("none",)
    even = replace(one, plan=replace(one.plan, num_slices=255))
    assert min(run_plan.equal_slices(even, picky, 2).plan.lengths[0]) >= 2


def test_the_search_knows_what_compiled_layers_cannot_defer(tmp_path: Path) -> None:
    """Orders that defer weight gradients were chosen for layers whose compiled code gives them with the backward."""
    config = short_run(tmp_path, PRESET, "model.compile=true")
    own = make_model(config.model, config.data, 257)
    other = replace(own, model=own_model.Decoder())
    eager = replace(config, model=replace(config.model, compile=False))
    spec = [run_plan._spec(c, m) for c, m in ((config, own), (config, other), (eager, other))]
    assert [s is not None and s.fused_grads for s in spec] == [True, False, True]


def sizes_measured(config: RunConfig) -> set[int]:
    made, world = make_model(config.model, config.data, 257), Transport.join(local_device(), timeout=300.0)
    return {sample.size for sample in run_plan.measure(config, made, world).samples}


def test_merging_sequences_is_measured(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Microbatches of one sequence were measured only, so merging some never looked worth it."""
    config = short_run(tmp_path, PRESET, "data.seq_len=64", "data.batch_size=4", "plan.seconds=0.01")
    assert ranks(1)(sizes_measured, config) == [{1, 4}]


def test_a_number_of_slices_and_their_lengths_are_two_keys(tmp_path: Path) -> None:
    """``slices = [2048]`` was 2,048 slices, ``slices = [1024, 1024]`` two, and ``slices = 0`` a division by zero."""
    made = make_model(short_run(tmp_path, PRESET).model, short_run(tmp_path, PRESET).data, 257)
    for change, lengths in (("num_slices=2", (8, 8)), ("slice_lengths=[16]", (16,)), ("slice_lengths=[9,7]", (9, 7))):
        assert run_plan.equal_slices(short_run(tmp_path, PRESET, f"plan.{change}"), made, 1).plan.lengths[0] == lengths
    run_plan.equal_slices(short_run(tmp_path, PRESET, "plan.num_slices=0"), made, 1)  # as many as seem right
    with pytest.raises(ValueError, match=r"\[plan\] slice_lengths\[0\] must be a whole number of at least 1, got 0"):
        short_run(tmp_path, PRESET, "plan.slice_lengths=0")
    with pytest.raises(ValueError, match=r"\[plan\] num_slices is a number .* give one"):
        short_run(tmp_path, PRESET, "plan.num_slices=2", "plan.slice_lengths=[8,8]")


# Packed documents: every batch cut by its own, the same curve, and when it is not done
SHAPE = "layers=4,hidden=16,heads=2"
TOKENS = 256


def config(folder: Path, *replaced: str) -> RunConfig:
    return parse(
        f"""
[model]
preset = "{SHAPE}"
dtype = "float64"
[data]
train = "{folder.parent / "texts.jsonl"}"
cache = "{folder.parent / "data"}"
seq_len = {TOKENS}
batch_size = 4
packing = "packed"
[plan]
profile = "{folder.parent / "profile.json"}"
microbatch_size = 1
pp = 2
order = "terapipe"
chunks = 1
[optimizer]
steps = 3
lr = 0.01
eps = 1e-4
[lr]
warmup = 2
kind = "constant"
[checkpoints]
every = 0
[logging]
folder = "{folder}"
tensorboard = false
every = 1
[failures]
timeout = 300
""",
        replaced,
    )


def profile() -> Profile:
    """Attention costs as much as all else in a document of 40 tokens."""
    samples = []
    for kind, scale in (("forward", 1.0), ("backward", 2.0)):
        for length, context in [(n, 0) for n in (16, 32, 64, 128, 256)] + [(n, c) for n in (16, 64) for c in (64, 192)]:
            seconds = scale * (1e-3 + 2e-5 * length + 1e-6 * length * (context + length / 2))
            samples.append(Sample(kind, 1, length, context, (seconds,)))
    shape = replace(gpt_config(SHAPE), vocab=257)
    return Profile(shape, 2, TOKENS, 2, tuple(samples), (), (1e-9,), {"memory": 2**33, "dtype": "float64"}, {})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of 5 to 300 bytes, most of them short."""
    folder = tmp_path_factory.mktemp("runs")
    text, at, texts = TEXT.read_text(), 0, []
    for number in range(240):
        length = 300 if number % 9 == 0 else 5 + 7 * (number % 8)
        texts.append(text[at : at + length])
        at += length
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    profile().save(folder / "profile.json")
    return folder


def by_documents(gpt: GPT, rows: Sequences) -> Tensor:
    """Each document by itself."""
    assert rows.documents is not None
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels, starts in zip(rows.ids, rows.labels, rows.documents, strict=True):
        for first, last in zip(starts, (*starts[1:], len(ids)), strict=True):
            total = total + gpt.loss(gpt(ids[None, first:last]), labels[None, first:last])
    return total / (rows.labels != IGNORE).sum()


def last_plan(folder: Path) -> Plan:
    return Plan.from_dict(json.loads((folder / "timeline.json").read_text())["plan"])


def told_of_plans(folder: Path) -> list[str]:
    return [row["message"] for row in read(folder) if row.get("event") == "plan"]


def test_the_curve_is_that_of_one_plan_and_of_a_plain_loop(ranks: Callable[[int], Ranks], place: Path) -> None:
    one_plan = config(place / "fixed", "plan.per_batch=false")
    ranks(2)(train, one_plan)
    assert told_of_plans(one_plan.folder) == []
    base = Plan.from_json((one_plan.folder / "plan.json").read_text())
    assert last_plan(one_plan.folder) == base
    data = open_data(one_plan.data, Path(one_plan.data.cache))
    rows = Batches(data.train, TOKENS, "packed", True, 0)
    wanted = curve(one_plan, GPT(replace(gpt_config(SHAPE), vocab=257)).double(), rows, 3, by_documents)
    assert losses(one_plan.folder) == pytest.approx(wanted, rel=1e-9)
    told = config(place / "own")
    ranks(2)(train, told)
    assert losses(told.folder) == pytest.approx(wanted, rel=1e-9)
    assert "cut by the costs of its own documents" in told_of_plans(told.folder)[0]
    assert not any("predicted" in row for row in read(told.folder)), "which is that of whole sequences"
    assert Plan.from_json((told.folder / "plan.json").read_text()) == base, "that of whole sequences"
    assert last_plan(told.folder) != base


def test_a_run_that_goes_on_cuts_as_before(ranks: Callable[[int], Ranks], place: Path) -> None:
    straight, broken = place / "straight", place / "broken"
    ranks(2)(train, config(straight))
    ranks(2)(train, config(broken), 1)
    (place / "profile.json").rename(place / "moved.json")  # its costs are kept with the plan
    try:
        ranks(2)(train, config(broken))
    finally:
        (place / "moved.json").rename(place / "profile.json")
    assert losses(broken) == losses(straight)
    assert last_plan(broken) == last_plan(straight)


# When it is not done


def planned(told: RunConfig, documents: DocumentCosts | None = None, slices: int = 4) -> tuple[bool, str]:
    model = make_model(told.model, told.data, 257)
    plan = Plan.uniform(batch_size=4, seq_len=TOKENS, num_slices=slices, boundaries=(0, 2, 4))
    planner, message = document_planner(told, model, PlanResult.of_plan(plan, Layout(1, 2), documents=documents))
    assert planner is None or planner.costs == (documents or DocumentCosts.of_shape(gpt_config(f"{SHAPE},vocab=257")))
    return planner is not None, message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("plan.num_slices=4", "plan.num_slices is set"),
        ("plan.slice_lengths=[100,156]", "plan.slice_lengths is set"),
        ("model.compile=true", "model.compile would compile"),
        ("plan.per_batch=false", ""),
        ("data.packing=concat", ""),
        ("data.packing=padded", ""),
    ],
)
def test_when_all_batches_are_cut_alike(tmp_path: Path, change: str, reason: str) -> None:
    assert planned(config(tmp_path / "run"))[0]
    done, message = planned(config(tmp_path / "run", change))
    assert not done
    assert reason in message
    assert bool(reason) == bool(message)


def test_whole_sequences_cannot_be_cut(tmp_path: Path) -> None:
    assert planned(config(tmp_path / "run"), slices=1) == (False, "")


def test_known_costs_come_before_arithmetic(tmp_path: Path) -> None:
    assert planned(config(tmp_path / "run"), DocumentCosts(7, 8, 9))[0]


def test_a_run_may_begin_or_cease_to_cut_by_documents_with_the_same_plan(tmp_path: Path) -> None:
    assert request_key(config(tmp_path / "run"), 2) == request_key(config(tmp_path / "run", "plan.per_batch=false"), 2)
