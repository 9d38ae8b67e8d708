"""Two hundred random misuses: each is one message and exit code 2, before anything is computed, started or written."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from terapipe import Plan, schedule
from terapipe.cli import main
from terapipe.launch import processes
from terapipe.planning.layout import Layout
from terapipe.scheduling.simulator import simulate
from terapipe.search.result import PlanResult
from tests.support.costs import SimpleCost
from tests.unit.planning.test_profile import made

COUNT, SEED = 200, 13
NOT_COUNTS = ("", "x", "0", "-3", "1.5", "nan", "1e3", "4,4", "0x10")
NOT_SECONDS = ("", "x", "0", "-1", "nan", "inf", "-inf", "1,5")
NOT_BYTES = ("", "lots", "-1GiB", "1TB", "16 apples", "0", "nan")
MODEL = ["--model", "layers=4,hidden=64,heads=4"]
SIZE = ["--batch-size", "2", "--seq-len", "64"]
FIXED = ["--dp", "1", "--pp", "2", "--tp", "1", "--order", "terapipe", "--recompute", "none"]
CLUSTER = [*MODEL, "--cluster", "dgx-a100:1"]
TOML = '[model]\npreset = "gpt-tiny"\n[data]\ntrain = "{text}"\nseq_len = 32\n[logging]\nfolder = "{folder}"\n'


class Files:
    """One of every kind that a command reads, and many that are none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plan = Plan((1, 1), ((32, 32),) * 2, (0, 2, 4))
        self.plan = self._write("plan.json", PlanResult.of_plan(plan, Layout(1, 2, 1)).to_json())
        self.bare = self._write("bare.json", plan.to_json())
        self.profile = self._write("profile.json", made().to_json())
        rows = [{"size": 1, "length": 64, "context": 0, "seconds": 1.0}]
        self.table = self._write("table.json", json.dumps(rows))
        self.timeline = self._write("timeline.json", simulate(schedule(plan), SimpleCost()).to_json())
        text = self._write("text.txt", "words " * 500)
        self.run = self._write("run.toml", TOML.format(text=text, folder=folder / "run"))
        wrong = {
            "empty": "", "null": "null", "number": "3", "list": "[1, 2]", "object": "{}", "cut": made().to_json()[:700],
            "text": "hello", "deep": "[" * 5000, "machine": self._changed(made().to_json(), machine=[]),
            "samples": self._changed(made().to_json(), samples=[{"kind": "forward"}]),
            "model": self._changed(made().to_json(), model={"layers": "four"}),
            "sizes": self._changed(plan.to_json(), sizes=["x"]), "order": self._changed(plan.to_json(), order="none"),
            "rank": self._changed(Path(self.timeline).read_text(), events=[[99, "F 0 0.0", 0.0, 1.0]]),
            "time": self._changed(Path(self.timeline).read_text(), events=[[0, "F 0 0.0", 0.0, "x"]]),
            "beside": self._changed(Path(self.plan).read_text(), planned={"layout": {"dp": 0}}),
        }  # fmt: skip
        self.wrong = [self._write(f"{name}.wrong", text) for name, text in wrong.items()]
        (folder / "binary.wrong").write_bytes(bytes(range(256)))
        (folder / "folder.wrong").mkdir()
        self.wrong += [str(folder / name) for name in ("binary.wrong", "folder.wrong", "nowhere.wrong")]

    def _write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def _changed(self, text: str, **values: Any) -> str:
        return json.dumps({**json.loads(text), **values})

    def bases(self) -> dict[str, list[str]]:
        """Commands that are right; each misuse changes one thing of one of them."""
        return {
            "plan": ["plan", *CLUSTER, *SIZE, *FIXED],
            "plan by profile": ["plan", "--profile", self.profile, "--batch-size", "2", "--seq-len", "2048", *FIXED],
            "plan by table": ["plan", "--cost-table", self.table, *SIZE, "--pp", "2"],
            "compare": ["compare", *CLUSTER, *SIZE, *FIXED[:6]],
            "simulate": ["simulate", self.plan, *CLUSTER],
            "simulate bare": ["simulate", self.bare, *CLUSTER, "--dp", "1", "--tp", "1"],
            "profile": ["profile", *MODEL, "--seq-len", "64", "--ranks", "1", "--out", str(self.folder / "new.json")],
            "train": ["train", self.run],
            "doctor": ["doctor"],
            "verify": ["verify", "llama"],
            "models": ["models"],
            "reproduce": ["reproduce"],
        }


def wrong_values(files: Files) -> Iterator[tuple[str, list[str]]]:
    """Options, and values of which none is right."""
    counts = ("batch-size", "seq-len", "dp", "pp", "tp", "microbatch-size", "chunks", "tile", "distinct", "num-slices")
    for verb in ("plan", "plan by profile", "compare", "simulate"):
        yield from ((verb, [f"--{name}={value}"]) for name in counts for value in NOT_COUNTS)
        yield from ((verb, [f"--memory={value}"]) for value in NOT_BYTES)
        yield from ((verb, [f"--order={value}"]) for value in ("", "fastest", "Gpipe"))
        yield from ((verb, ["--recompute", value]) for value in ("", "yes", "1"))
    for verb in ("plan", "compare"):
        yield from ((verb, ["--cluster", value]) for value in ("", "x", "dgx-a100:0", "dgx-a100:-1", "dgx-a100:x", ":"))
        shapes = (
            "",
            "gpt",
            "layers=4",
            "layers=4,hidden=64",
            "layers=4,hidden=65,heads=4",
            "layers=0,hidden=8,heads=1",
        )
        yield from ((verb, ["--model", value]) for value in (*shapes, "layers=x,hidden=8,heads=1", "heads=1,heads=1"))
    yield from (("plan", ["--slice-lengths", value]) for value in ("", "x", "64,", "32,31", "0,64", "-32,96", "32;32"))
    yield from (("plan", ["--endpoint", value]) for value in ("", "here", "h:0", "h:99999", ":80", "h:x"))
    yield from (("plan", [f"--script={value}"]) for value in ("", "'open", '"'))
    yield from (("simulate", [f"--width={value}"]) for value in NOT_COUNTS)
    for name in ("ranks", "seq-len", "sizes"):
        wrong = [v for v in NOT_COUNTS if (name, v) != ("sizes", "4,4")]
        yield from (("profile", [f"--{name}={value}"]) for value in wrong)
    yield from (("profile", [f"--seconds={value}"]) for value in NOT_SECONDS)
    yield from (("profile", ["--dtype", value]) for value in ("", "float8", "half"))
    yield from (("doctor", [f"--{name}={v}"]) for name in ("ranks", "port") for v in NOT_COUNTS)
    yield from (("doctor", [f"--timeout={value}"]) for value in NOT_SECONDS)
    yield from (("verify", [f"--{name}={v}"]) for name in ("stages", "num-slices") for v in NOT_COUNTS)
    keys = (
        "x",
        "=",
        "optimizer.lr",
        "optimizer.lr=fast",
        "optimizer.rate=1",
        "nothing.lr=1",
        "optimizer=3",
        "plan.dp=3",
    )
    more = (
        "data.seq_len=-1",
        "data.seq_len=1.5",
        "model.dtype=int8",
        "plan.order=none",
        "optimizer.steps=0",
        "a.b.c=1",
    )
    yield from (
        ("train", [value]) for value in (*keys, *more, "model.folder=x", "plan.memory=lots", "optimizer.lr=nan")
    )


def wrong_files(files: Files) -> Iterator[tuple[str, list[str]]]:
    """Inputs of every wrong kind, and outputs that cannot be written."""
    others = {
        "--profile": [files.plan, files.table, files.timeline, files.run],
        "--cost-table": [files.plan, files.profile, files.timeline, files.run],
        "--measured": [files.plan, files.table, files.profile, files.run],
        "": [files.table, files.profile, files.timeline, files.run],
    }
    for option, kinds in others.items():
        for path in [*kinds, *files.wrong]:
            if option in ("--profile", "--cost-table"):
                yield "", ["plan", option, path, *SIZE, "--pp", "2"]
            elif option:
                yield "simulate", [option, path]
            else:
                yield "", ["simulate", path, *CLUSTER, "--dp", "1", "--tp", "1"]
    for path in [files.plan, files.table, files.profile, *files.wrong]:
        yield "", ["train", path]
        yield "train", [f"plan.file={path}"] if path != files.plan else ["plan.file=nowhere"]
        yield "", ["profile", "--model", path, "--seq-len", "64"]
        yield "", ["verify", path]
    folder, under = str(files.folder), str(Path(files.plan) / "x")
    for path in (folder, under):
        yield from (("plan", [f"--{name}", path]) for name in ("save", "slurm", "kubernetes"))
        yield from ((verb, [f"--{name}", path]) for verb in ("compare", "simulate") for name in ("html", "svg", "png"))
        yield "simulate", ["--trace", path]
        yield "profile", ["--out", path]
    yield "reproduce", ["--out", files.plan]
    yield "reproduce", ["--out", under]
    yield "simulate", ["--svg", files.plan]
    yield "compare", ["--svg", f"{folder}/a", "--html", f"{folder}/a"]


def conflicts(files: Files) -> Iterator[tuple[str, list[str]]]:
    """Options that contradict each other, or of which one would have no effect."""
    pairs = [
        "--num-slices=2 --slice-lengths=32,32",
        "--num-slices=2 --tile=8",
        "--num-slices=2 --distinct=1",
        "--shard",
    ]
    pairs += [
        "--slice-lengths=32,32 --tile=16",
        "--order=gpipe --num-slices=2",
        "--order=1f1b --chunks=2",
        "--chunks=99",
    ]
    pairs += ["--order=gpipe --tile=8", "--order=1f1b --distinct=2", "--tp=3", "--pp=5", "--dp=2 --pp=8"]
    pairs += [
        "--microbatch-size=3",
        "--image=x",
        "--name=x",
        "--endpoint=h:1",
        f"--profile={files.profile}",
        "--tile=128",
    ]
    pairs += [f"--cost-table={files.table}", "--num-slices=65", "--memory=1KiB", "--order=terapipe-v --chunks=3"]
    yield from (("plan", pair.split()) for pair in pairs)
    pairs = ["--sensitivity", "--layers-only", *MODEL, "--cluster=dgx-a100:1"]
    yield from (("plan by profile", [pair] if pair.startswith("--") else MODEL) for pair in pairs)
    pairs = ["--sensitivity", "--layers-only", "--tile=8", "--chunks=1", "--recompute=full", "--distinct=1", "--shard"]
    pairs += [
        "--memory=1GiB",
        "--order=gpipe",
        "--model=gpt-tiny",
        "--num-slices=2",
        "--slice-lengths=32,32",
        "--seq-len=128",
    ]
    yield from (("plan by table", [pair]) for pair in pairs)
    pairs = ["--order=gpipe", "--num-slices=2", "--slice-lengths=32,32", "--chunks=2", "--distinct=2", "--shard"]
    yield from (("compare", [pair]) for pair in pairs)
    pairs = [
        "--order=gpipe",
        "--num-slices=2",
        "--slice-lengths=32,32",
        "--chunks=1",
        "--distinct=2",
        "--microbatch-size=1",
    ]
    pairs += ["--recompute=none", "--tile=8", "--dp=2", "--pp=3", "--tp=2", "--batch-size=3", "--seq-len=65", "--shard"]
    pairs += ["--json --width=80", f"--profile={files.profile}", "--model=gpt-small"]
    yield from (("simulate", pair.split()) for pair in pairs)
    yield from (("simulate bare", [pair]) for pair in ("--shard", "--dp=0", "--tp=3", "--batch-size=3", "--pp=4"))
    for verb in files.bases():
        yield from ((verb, [word]) for word in ("--nonsense", "--js", "--all=1", "--json=yes"))
    yield from (("", words.split()) for words in ("fly", "plan", "simulate", "compare --json", "train", "verify"))
    yield from (("", words.split()) for words in ("verify llama --all", "verify llamma", "profile --seq-len 64"))
    yield "", ["plan", *CLUSTER, "--batch-size", "2"]
    yield "", ["plan", "--cluster", "dgx-a100:1", *SIZE]
    yield "", ["plan", *MODEL, *SIZE]
    yield "", ["simulate", files.plan]
    yield "", ["simulate", files.bare, *CLUSTER]


def misuses(files: Files) -> list[list[str]]:
    """As many of each of the three kinds; the later of two equal options counts, so bases need not be without them."""
    chosen, bases = random.Random(SEED), files.bases()
    kinds = [list(kind(files)) for kind in (wrong_values, wrong_files, conflicts)]
    found = []
    for number in range(COUNT):
        kind = kinds[number % len(kinds)]
        verb, words = kind.pop(chosen.randrange(len(kind)))
        found.append([*bases.get(verb, []), *words])
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("misuse"))


def never(*given: Any, **named: Any) -> None:
    raise AssertionError("ranks were started")


def test_two_hundred_misuses(files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "launch", never)
    monkeypatch.setattr(processes, "launch_module", never)
    before = sorted(path.name for path in files.folder.iterdir())
    wrong = []
    for arguments in misuses(files):
        code: Any = None
        try:
            code = main(arguments)
        except BaseException as error:
            code = repr(error)
        said = capsys.readouterr()
        one = said.err.startswith("terapipe") and said.err.count("\n") == 1 and len(said.err) > 25
        if code != 2 or said.out or not one:
            wrong.append((arguments, code, said.out[:200], said.err[:400]))
    assert wrong == []
    assert sorted(path.name for path in files.folder.iterdir()) == before


@pytest.mark.parametrize("verb", ["plan", "plan by profile", "plan by table", "compare", "simulate", "simulate bare"])
def test_what_is_misused_is_right_by_itself(verb: str, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files.bases()[verb], "--json"]) == 0, capsys.readouterr().err


HUGE = str(10**30)
ABSURD = [
    ["plan", "--seq-len", HUGE],
    ["plan", "--batch-size", HUGE],
    ["plan", "--batch-size", "1000000000"],
    ["plan", "--dp", HUGE],
    ["plan", "--num-slices", HUGE],
    ["plan", "--memory", f"{HUGE}GiB"],
    ["plan", "--model", "layers=1000000,hidden=64,heads=4"],
    ["plan", "--model", f"layers=4,hidden=64,heads=4,vocab={HUGE}"],
    ["plan", "--cluster", f"dgx-a100:{HUGE}"],
    ["compare", "--seq-len", HUGE],
    ["compare", "--model", "layers=1000000,hidden=64,heads=4"],
    ["profile", "--ranks", "100000", "--model", "layers=10000,hidden=64,heads=4"],
    ["profile", "--seq-len", HUGE],
    ["profile", "--sizes", HUGE],
    ["simulate", "--width", HUGE],
    ["verify", "--stages", HUGE],
    ["doctor", "--ranks", "100000"],
    ["doctor", "--timeout", "1e300"],
    ["train", "model.preset=layers=1000000,hidden=64,heads=4"],
    ["train", "optimizer.lr=inf"],
    ["train", "optimizer.beta1=1.0"],
    ["train", "optimizer.beta2=7"],
    ["train", f"optimizer.steps={HUGE}"],
    ["train", f"data.seq_len={HUGE}"],
    ["train", f"data.seed={HUGE}"],
    ["train", "failures.timeout=1e300"],
    ["train", "plan.ranks=1000000", "plan.dp=1"],
    ["train", "plan.num_slices=1000000"],
    ["train", "plan.slice_lengths=[10,10]"],
]


@pytest.mark.parametrize("arguments", ABSURD, ids=lambda words: " ".join(words).replace(HUGE, "HUGE"))
def test_absurd_numbers_are_one_message(
    arguments: list[str], files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some were a traceback, some did not come to an end, some started as many ranks."""
    monkeypatch.setattr(processes, "elastic_launch", never)
    verb, *words = arguments
    assert main([*files.bases()[verb], *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"terapipe {verb}: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("kind", ["fifo", "device", "deep"])
@pytest.mark.parametrize("verb", ["train", "plan file", "plan profile", "simulate", "plan", "table", "profile"])
def test_what_is_no_file_is_one_message(
    verb: str, kind: str, tmp_path: Path, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.write_text("x = " * (verb == "train") + "[" * 200_000)
    arguments = {
        "train": ["train", str(path)],
        "plan file": ["train", files.run, f"plan.file={path}"],
        "plan profile": ["train", files.run, f"plan.profile={path}"],
        "simulate": ["simulate", str(path), *CLUSTER, "--dp", "1", "--tp", "1"],
        "plan": ["plan", "--profile", str(path), *SIZE, "--pp", "2"],
        "table": ["plan", "--cost-table", str(path), *SIZE, "--pp", "2"],
        "profile": ["profile", "--model", str(path), "--seq-len", "64"],
    }[verb]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert said.count("\n") == 1


MISTAKES = {
    "data.train={}/nothing.txt": "matches none",
    "data.eval={}/nothing.txt": "matches none",
    "data.train={}/profile.json": "text is read from files that end in",
    "data.tokenizer={}/nothing": "there is no such folder",
    "model.preset=gpt-tini": "did you mean 'gpt-tiny'",
    "model.folder={}/nothing": "a folder with a config.json",
    "model.config={}/nothing.json": "a folder with a config.json",
    "model.factory={}/nothing.py:model": "there is no file",
    "objective.kind={}/nothing.py:loss": "there is no file",
    "plan.file={}/profile.json": "a plan has exactly the keys",
    "plan.file={}/plan.json": "is for 2 sequences of 64 tokens",
    "plan.profile={}/plan.json": "this profile lacks or misnames",
    "plan.pp=8": "every stage needs a layer",
    "plan.ranks=3 plan.dp=1 plan.pp=2": "dp x pp x tp",
    "checkpoints.resume={}/nothing": "must be auto, off or the folder of a checkpoint",
}


@pytest.mark.parametrize("ranks", ["plan.ranks=2", "plan.ranks=1"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_files_and_presets_are_found_before_ranks_start(
    mistake: str,
    ranks: str,
    files: Files,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank told them, once they had met."""
    monkeypatch.setattr(processes, "launch_module", never)
    monkeypatch.setattr("terapipe.training.run.run_rank", never)
    words = mistake.format(files.folder).split()
    words += [ranks] * ("plan." not in mistake) + ["model.preset="] * mistake.startswith(("model.f", "model.c"))
    assert main(["train", files.run, *words]) == 2
    said = capsys.readouterr().err
    assert MISTAKES[mistake] in said
    assert said.count("\n") == 1
