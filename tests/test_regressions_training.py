"""What went wrong in training runs once, and must not again: one short story each."""

import fcntl
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from examples import own_model
from terapipe import Pipeline, Timeline, api
from terapipe.cli import main
from terapipe.launch import processes
from terapipe.launch.processes import blame
from terapipe.runtime.comm.errors import PipelineError
from terapipe.runtime.comm.transport import Transport
from terapipe.search.request import Request
from terapipe.training import run_plan
from terapipe.training.checkpoint_folder import CheckpointFolder
from terapipe.training.config import CheckpointConfig, RunConfig, parse
from terapipe.training.data.loader import Batches
from terapipe.training.data.prepare import prepare
from terapipe.training.data.text_reader import read_documents
from terapipe.training.data.token_file import TokenFile, open_data
from terapipe.training.data.tokenizer import ByteTokenizer
from terapipe.training.lock import FILE, Holder, Lock
from terapipe.training.logging.display import Display
from terapipe.training.logging.metrics import read
from terapipe.training.model import RunModel, make_model
from tests.docs.test_readme import README
from tests.support.ranks import Ranks
from tests.unit.training.test_run import TEXT, losses, train


def told(folder: Path, *replaced: str) -> RunConfig:
    """A run of three steps on bytes; without a model."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT.read_text()[:3000])
    lines = f"""
[data]
train = "{text}"
seq_len = 16
[plan]
seconds = 0
[optimizer]
steps = 3
[lr]
warmup = 0
[evaluation]
every = 0
[logging]
folder = "{folder / "run"}"
tensorboard = false
[failures]
timeout = 300
"""
    return parse(lines, replaced)


GPT = "model.preset=layers=2,hidden=16,heads=4"


# The end of a run


def test_the_last_step_is_evaluated(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """README's run, 20 steps with evaluations every 100, ended without any."""
    config = told(tmp_path, GPT, "data.eval_share=0.2", "evaluation.every=2", "evaluation.batches=1")
    ranks(1)(train, config)
    assert [row["step"] for row in read(config.folder) if "eval_loss" in row] == [2, 3]


# One run per folder


def test_a_second_run_in_a_folder_is_refused(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Two runs in one folder mangled each other's metrics and mixed their checkpoints."""
    config = told(tmp_path, GPT)
    with Lock(config.folder), pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on .*, since 20"):
        ranks(1)(train, config)
    assert {file.name for file in config.folder.iterdir()} == {FILE}, "nothing was written"
    (config.folder / FILE).write_text(json.dumps(asdict(Holder.this())))  # as one that was killed leaves it
    ranks(1)(train, config)
    assert len(losses(config.folder)) == 3


def test_a_lock_of_a_process_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system knows no locks, its text decides; the number of a process alone tells nothing."""
    monkeypatch.setattr("terapipe.training.lock._locked", lambda file: None)
    this = asdict(Holder.this())

    def left(**changed: object) -> None:
        (tmp_path / FILE).write_text(json.dumps({**this, **changed}))

    left()
    with pytest.raises(ValueError, match="in use by process"), Lock(tmp_path):
        pass
    left(ticks="of another process with this number")
    with Lock(tmp_path):
        pass
    left(host="another", job="7")
    with pytest.raises(ValueError, match=r"on another, .* surely gone, delete"), Lock(tmp_path):
        pass
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with Lock(tmp_path):  # torchrun has moved the first rank
        pass


# Going on


def test_going_on_compares_what_must_not_change(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Four heads became two without a word, as all tensors have the same shapes."""
    ranks(1)(train, told(tmp_path, GPT))
    more = "optimizer.steps=4"
    with pytest.raises(
        ValueError, match=r"step-00000003 has others: model.heads: 4 -> 2; model.kv_heads: 4 -> 2; set what"
    ):
        ranks(1)(train, told(tmp_path, "model.preset=layers=2,hidden=16,heads=2", more))
    with pytest.raises(ValueError, match=r"others: data.packing: concat -> padded"):
        ranks(1)(train, told(tmp_path, GPT, more, "data.packing=padded"))
    with pytest.raises(ValueError, match=r"tokenizer.end: 256 -> 0; the tokenizer's files are others; set"):
        ranks(1)(train, told(tmp_path, f"{GPT},vocab=257", more, "data.tokenizer=train", "data.vocab=257"))
    (tmp_path / "text.txt").write_text(TEXT.read_text()[:4000])
    ranks(1)(train, told(tmp_path, GPT, more, "optimizer.lr=1e-5", "data.seed=5", "lr.warmup=1"))
    said = next(row["message"] for row in read(tmp_path / "run") if row.get("event") == "changed")
    assert said == (
        "data.train: 3001 tokens in 1 documents -> 4001 tokens in 1 documents; data.seed: 0 -> 5; lr.warmup: 0 -> 1; "
        "optimizer.lr: 0.0003 -> 1e-05; optimizer.steps: 3 -> 4"
    )


def test_a_vocabulary_is_refused_not_replaced(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A shape's vocabulary and positions were those of the data, whatever the shape said."""
    with pytest.raises(ValueError, match=r"a model of 100 and a tokenizer of 257; .* vocab=257 in model.preset"):
        ranks(1)(train, told(tmp_path, f"{GPT},vocab=100"))
    with pytest.raises(ValueError, match=r"max_seq_len=8 in model.preset and data.seq_len 16"):
        ranks(1)(train, told(tmp_path, f"{GPT},max_seq_len=8"))


# Tokenizers


def test_the_tokenizer_follows_the_model(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A pretrained model was trained on bytes, which were the default whatever the model."""
    from transformers import LlamaConfig

    folder = tmp_path / "llama"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**sizes, vocab_size=300).save_pretrained(folder)
    own = f"model.config={folder / 'config.json'}"
    with pytest.raises(ValueError, match=r"llama holds no tokenizer .* set data.tokenizer"):
        ranks(1)(train, told(tmp_path, own))
    ByteTokenizer().save(folder)
    config = told(tmp_path, own)
    assert config.data.tokenizer == str(folder)
    assert told(tmp_path, own, "data.tokenizer=bytes").data.tokenizer == "bytes"
    LlamaConfig(**sizes, vocab_size=200).save_pretrained(folder)
    with pytest.raises(ValueError, match="a model of 200 and a tokenizer of 257; take the model's own"):
        ranks(1)(train, config)


# Plans


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
    config = told(tmp_path, GPT, "data.seq_len=2041", "plan.tp=6", "data.batch_size=4")
    able = make_model(config.model, config.data, 257)
    picky = replace(able, shortest=2, recompute_modes=("none",))
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
    config = told(tmp_path, GPT, "model.compile=true")
    own = make_model(config.model, config.data, 257)
    other = replace(own, model=own_model.Decoder())
    eager = replace(config, model=replace(config.model, compile=False))
    spec = [run_plan._spec(c, m) for c, m in ((config, own), (config, other), (eager, other))]
    assert [s is not None and s.fused_grads for s in spec] == [True, False, True]


def sizes_measured(config: RunConfig) -> set[int]:
    made = make_model(config.model, config.data, 257)
    return {sample.size for sample in run_plan.measure(config, made).samples}


def test_merging_sequences_is_measured(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Microbatches of one sequence were measured only, so merging some never looked worth it."""
    config = told(tmp_path, GPT, "data.seq_len=64", "data.batch_size=4", "plan.seconds=0.01")
    assert ranks(1)(sizes_measured, config) == [{1, 4}]


def test_a_number_of_slices_and_their_lengths_are_two_keys(tmp_path: Path) -> None:
    """``slices = [2048]`` was 2,048 slices, ``slices = [1024, 1024]`` two, and ``slices = 0`` a division by zero."""
    made = make_model(told(tmp_path, GPT).model, told(tmp_path, GPT).data, 257)
    for change, lengths in (("num_slices=2", (8, 8)), ("slice_lengths=[16]", (16,)), ("slice_lengths=[9,7]", (9, 7))):
        assert run_plan.equal_slices(told(tmp_path, GPT, f"plan.{change}"), made, 1).plan.lengths[0] == lengths
    run_plan.equal_slices(told(tmp_path, GPT, "plan.num_slices=0"), made, 1)  # as many as seem right
    with pytest.raises(ValueError, match=r"plan\.slice_lengths must be positive, got 0"):
        told(tmp_path, GPT, "plan.slice_lengths=0")
    with pytest.raises(ValueError, match=r"plan\.num_slices is a number .* give one"):
        told(tmp_path, GPT, "plan.num_slices=2", "plan.slice_lengths=[8,8]")


def watched(config: RunConfig) -> list[bool]:
    """Trains; after each step, whether no gradient is left."""
    found = []

    class Watched(Pipeline):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            found.append(all(p.grad is None for p in self.parameters()))

        def timeline(self) -> Timeline:
            raise AssertionError("sent to all ranks")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("terapipe.training.run.Pipeline", Watched)
        train(config)
    return found


def test_replicas_keep_no_zeros_and_one_rank_has_the_timeline(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Replicas set zeros aside in every step, to add them to new gradients; all events of all ranks went to all."""
    config = told(tmp_path, GPT, "data.batch_size=2", "plan.dp=2", "logging.every=1")
    assert ranks(2)(watched, config) == [[True] * 3] * 2
    config = told(tmp_path, GPT, "plan.pp=2", "logging.every=1", f"logging.folder={tmp_path / '2'}")
    ranks(2)(watched, config)
    assert all({"idle", "memory"} <= row.keys() for row in read(config.folder) if "loss" in row)
    assert Timeline.from_json((config.folder / "timeline.json").read_text()).plan.num_ranks == 2


# Failing


def failure(folder: Path, rank: int, code: int, said: str) -> ProcessFailure:
    file = folder / f"{rank}.json"
    if said:
        file.write_text(json.dumps({"message": {"message": said, "extraInfo": {"timestamp": "1"}}}))
    return ProcessFailure(rank, 0, code, str(file))


@pytest.mark.parametrize(
    ("found", "blamed"),
    [
        # One was stopped: torchelastic killed it in the end, and the one that noticed ended first.
        (
            [(0, 1, "PipelineError: rank 1 did not answer in time: it is stuck; rank 0 waited 5 s at x for rank 1"),
             (1, -9, "")],
            "rank 1 did not answer in time: it is stuck",
        ),
        (
            [(0, 1, "PipelineError: rank 2 is gone: it died; rank 0 was waiting at x for rank 2"), (1, -9, ""),
             (2, -11, "")],
            "rank 2 ended with signal SIGSEGV",
        ),
        (
            [(0, 1, "PipelineError: rank 1 stopped: ValueError: no; rank 0 was waiting at x for rank 1"),
             (1, 1, "ValueError: no; really")],
            "rank 1 stopped: ValueError: no; really",
        ),
        ([(0, 3, "")], "rank 0 ended with exit code 3"),
    ],
)  # fmt: skip
def test_the_last_line_blames_the_right_rank(tmp_path: Path, found: list[tuple[int, int, str]], blamed: str) -> None:
    """The one that ended first was blamed, which was the one that had waited for a rank that hung."""
    assert blame({rank: failure(tmp_path, rank, code, said) for rank, code, said in found}) == blamed


def tell_the_loss(told: Path) -> str:
    transport = Transport.join(torch.device("cpu"), timeout=300.0)
    transport.gather(0)  # all are connected, however long that takes; only then is the wait a short one
    for role in ("pp", "all"):
        _set_pg_timeout(timedelta(seconds=1), transport.ranks[role].tensors)
    if transport.rank == 0:  # hangs, until the other has noticed
        while not told.exists():
            time.sleep(0.01)
        return ""
    try:
        transport.broadcast(torch.zeros(1 << 20), 1, "the loss")
    except PipelineError as error:
        return str(error)
    finally:
        told.touch()
    return "nothing was noticed"


def test_who_tells_all_others_waits_for_them(fresh_ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """The last stage, which tells the loss, said that it had waited for itself."""
    assert fresh_ranks(2)(tell_the_loss, tmp_path / "told")[1].startswith("rank 0 did not answer in time")


def test_a_failure_is_told_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was part of what a run prints, and lost where that went to a file."""
    path = tmp_path / "run.toml"
    path.write_text(told(tmp_path, GPT, "plan.pp=2").to_toml())
    monkeypatch.setattr("terapipe.launch.processes.launch_module", lambda *given: "rank 1 ended with signal SIGKILL")
    assert main(["train", str(path)]) == 1
    assert capsys.readouterr() == ("", "terapipe train: rank 1 ended with signal SIGKILL\n")


# Messages


def test_what_is_set_is_not_advised(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A run that left out steps already was told to leave them out."""
    config = told(tmp_path, GPT, "optimizer.lr=1e300", "failures.on_nan=skip", "failures.max_skipped=1")
    with pytest.raises(ArithmeticError, match=r"smaller optimizer\.lr, or raise failures\.max_skipped from 1\b"):
        ranks(1)(train, config)


def test_the_place_of_a_bad_byte_is_that_in_the_file(tmp_path: Path) -> None:
    """It was the place in the part of the file that was just decoded, or in a line."""
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_bytes("é".encode() * 200_001 + b"\xff" + b"a" * 9)
    with pytest.raises(ValueError, match=r"a\.txt is not: byte 0xff at place 400002 \(invalid start byte\)"):
        list(read_documents([text], "text"))
    lines.write_bytes(b'{"text": "a"}\n' * 3 + b'{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl is not: byte 0xe9 at place 55 "):
        list(read_documents([lines], "text"))


def test_a_token_out_of_range_is_named(tmp_path: Path) -> None:
    """It ended as an index error of an embedding, with a traceback."""
    config = told(tmp_path, GPT)
    prepare(config.data, tmp_path / "data")
    file = open_data(config.data, tmp_path / "data").train
    damaged = np.memmap(file.folder / "tokens.bin", file.dtype, "r+")
    damaged[20] = 9999
    damaged.flush()
    batches = Batches(TokenFile.open(file.folder), 16, "concat", False, 0)
    assert batches.read(0, 1).ids.max() < 257
    said = r"tokens\.bin must be below the vocabulary of 257, the one at place 20 is 9999; the file is damaged"
    with pytest.raises(ValueError, match=said):
        batches.read(1, 1)


def test_the_panel_is_right(tmp_path: Path) -> None:
    """A checkpoint written in the background was shown as of the step at which it was done, and the speed of the last
    step stood beside the time of all recent ones."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
    display = Display(console, 100, 0, 10, "a run")
    said = []
    saves = CheckpointFolder(tmp_path, CheckpointConfig(), False, lambda *row: said.append(row))
    saves._saved({"step": 7, "best": None})
    display.row({"step": said[0][2], "event": "checkpoint", "message": ""})
    for step, seconds in enumerate((1.0, 1.0, 4.0), 8):
        display.row({"step": step, "seconds": seconds, "tokens_per_second": 100 / seconds})
    assert display._known["saved"] == 7
    assert (display._known["median"], display._known["tokens_per_second"]) == (1.0, 100.0)


def test_the_export_is_announced(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A run ended without a word of what it had written."""
    folder = tmp_path / "exported"
    config = told(tmp_path, GPT, f"checkpoints.export={folder}")
    ranks(1)(train, config)
    said = [row["message"] for row in read(config.folder) if row.get("event") == "export"]
    assert said[-1] == f"wrote model and tokenizer to {folder}"


WATCHED = """
import os, signal, sys, termios
from terapipe.training.trainer import StopSignal
from terapipe.training.logging.display import Terminal

with Terminal() as terminal:
    stop = StopSignal(terminal.restore)
    print("^C is printed:", bool(termios.tcgetattr(0)[3] & termios.ECHOCTL), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_terminal_is_left_as_it_was(tmp_path: Path) -> None:
    """A second Ctrl-C left the cursor hidden, and the first one's ^C pushed the panel out of its place."""
    ours, theirs = os.openpty()

    def take() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    line = [sys.executable, "-c", WATCHED]
    code = subprocess.run(line, stdin=theirs, stdout=theirs, start_new_session=True, preexec_fn=take).returncode
    said = os.read(ours, 4096).decode()
    left = termios.tcgetattr(theirs)[3] & termios.ECHOCTL
    os.close(ours)
    os.close(theirs)
    assert code == 128 + signal.SIGINT
    assert "^C is printed: False" in said
    assert said.endswith("\x1b[?25h"), "the cursor is shown"
    assert left


def test_the_readmes_run_warms_up() -> None:
    """Its learning rate never came near what was asked for: 100 steps of warm-up in a run of 20."""
    (text,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    assert parse(text).lr.warmup <= parse(text).optimizer.steps / 4


def test_torchs_log_lines_are_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stood between ours, in the middle of the panel."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.setLevel(logging.WARNING)
    monkeypatch.setattr(processes, "elastic_launch", lambda *given: lambda *given: None)
    processes.launch_module("nothing", [], 1, 0)
    assert not logger.isEnabledFor(logging.ERROR)
