"""What is measured of any model; messages between ranks: over which links, and for how long at most."""

import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from examples import own_model
from terapipe.cli import main
from terapipe.launch import processes
from terapipe.modeling.gpt import GPT
from terapipe.modeling.stage import PipelineModel
from terapipe.planning.cost import StageSpec
from terapipe.planning.presets import PRESETS, GPTConfig
from terapipe.planning.profile import KINDS, FittedCost, Profile, Transfer
from terapipe.runtime import profiler
from tests.support.hf_models import small_config
from tests.support.models import TINY, make_model
from tests.support.ranks import Ranks

ROUGH = GPTConfig(own_model.LAYERS, own_model.HIDDEN, own_model.HEADS, vocab=own_model.VOCAB)


def check(made: profiler.Profiler, layers: int) -> None:
    """Two rounds, of which each point has a measurement of every kind, make a profile that can be planned with."""
    made.round()
    made.round()
    profile = made.profile()
    assert profile.layers == layers
    assert profile.machine["dtype"] == str(made.dtype).removeprefix("torch.")
    left_out = {"light", "block"} - {*made._again}  # where layers cannot be computed again
    assert {s.kind for s in profile.samples} == set(KINDS) - left_out
    both = [{(s.size, s.length, s.context) for s in profile.samples if s.kind == kind} for kind in KINDS[:2]]
    assert both == [{point[:3] for point in made.points}] * 2
    assert len(FittedCost(profile).errors()) == 6
    assert all(p.grad is None for p in made.stage.parameters())


@pytest.mark.parametrize(("layers", "measured"), [(2, 2), (4, 3)])
def test_a_gpt_and_its_weights_left_as_they_were(layers: int, measured: int) -> None:
    """The first layer is not measured with the others: its stage has the embedding too."""
    model = make_model(TINY, torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    check(profiler.Profiler(model, layers=layers, seq_len=32, sizes=(1, 2)), measured)
    assert all(torch.equal(p.cpu(), before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_single_layer() -> None:
    config = GPTConfig(1, 16, 4, vocab=19, max_seq_len=32)
    check(profiler.Profiler(GPT(config), layers=1, seq_len=32), 1)


def test_a_model_of_ones_own() -> None:
    check(profiler.Profiler(own_model.Decoder(), layers=2, seq_len=32, shape=ROUGH), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "backend", "shortest"), [("llama", "attention", 1), ("qwen3_5_text", "cache", 2)])
def test_a_hugging_face_decoder(name: str, backend: str, shortest: int, dtype: torch.dtype) -> None:
    from terapipe.hf import Decoder

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoder = Decoder.from_config(small_config(name), dtype=dtype)
    assert decoder.backend == backend
    made = profiler.Profiler(decoder, layers=2, seq_len=32, shape=decoder.shape)
    assert min(point.length for point in made.points) == shortest
    assert made.dtype == dtype
    check(made, 2)
    assert all(p.is_meta for p in decoder.model.parameters())


def test_another_dtype_needs_weights_that_are_not_the_models() -> None:
    with pytest.raises(ValueError, match=r"convert it with .to\(torch.bfloat16\)"):
        profiler.Profiler(GPT(TINY), layers=1, seq_len=16, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = GPT(TINY)
    made = profiler.Profiler(model, layers=1, seq_len=16, dtype=torch.bfloat16)
    made.round(made.points[:1])
    assert {p.dtype for p in made.stage.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "layers", "shape", "said"),
    [
        (own_model.Decoder(), 1, None, "the shape of a Decoder must be told"),
        (own_model.Decoder(), 1, GPTConfig(3, 64, 4), "as many layers, got 3 and 4"),
        (GPT(TINY), 5, None, "at most all 4 layers can be measured, got 5"),
    ],
)
def test_what_cannot_be_measured(model: PipelineModel, layers: int, shape: GPTConfig | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        profiler.Profiler(model, layers=layers, seq_len=16, shape=shape)


def test_the_command_takes_a_hugging_face_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_config("llama").save_pretrained(tmp_path)
    command = ["profile", "--seq-len", "32", "--seconds", "0.1", "--ranks", "1", "--dtype", "bfloat16"]
    command += ["--out", str(tmp_path / "profile.json")]
    with (  # all in this process
        patch.object(processes, "launch", lambda function, ranks, *given: function(*given)),
        patch.object(processes, "take_cores"),
    ):
        assert main([*command, "--model", str(tmp_path / "config.json")]) == 0
    profile = Profile.from_json((tmp_path / "profile.json").read_text())
    assert (profile.config.hidden, profile.machine["dtype"]) == (64, "bfloat16")
    assert main([*command, "--model", "llama"]) == 2
    assert "llama is a type of models, not one: give the config.json" in capsys.readouterr().err


def measured(hosts: str, seconds: float) -> tuple[tuple[str, ...], list[Transfer]]:
    """The hosts, one letter for each rank's, and the messages between them, in about so many seconds for each link."""
    name = hosts[dist.get_rank()]
    with (
        patch.object(profiler, "host_name", lambda: name),
        patch.object(profiler, "SENDING", seconds),
        patch.object(profiler, "CUDA_MESSAGES", profiler.MESSAGES),
    ):
        made = profiler.Profiler(GPT(PRESETS["gpt-tiny"]), layers=1, seq_len=16)
        return made.hosts, made._transfers()


@pytest.mark.parametrize(("hosts", "kinds"), [("aa", [False]), ("ab", [True]), ("abb", [False, True])])
def test_neighbours_on_one_host_and_on_two(ranks: Callable[[int], Ranks], hosts: str, kinds: list[bool]) -> None:
    for found, transfers in ranks(len(hosts))(measured, hosts, 60.0):
        assert found == tuple(hosts)
        measured_kinds = [t.between_hosts for t in transfers]
        assert measured_kinds == [kind for kind in kinds for _ in profiler.MESSAGES]
        assert [t.nbytes for t in transfers] == [*profiler.MESSAGES] * len(kinds)
        assert all(len(t.seconds) >= profiler.LEAST and min(t.seconds) > 0 for t in transfers)


def test_a_slow_link_is_measured_with_small_messages(ranks: Callable[[int], Ranks]) -> None:
    one, other = (transfers for _, transfers in ranks(2)(measured, "ab", 1e-9))
    assert [t.nbytes for t in one] == list(profiler.MESSAGES[: profiler.LEAST])
    assert all(len(t.seconds) == profiler.LEAST for t in one[1:])
    assert one == other


def test_one_rank_has_nobody_to_send_to(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(1)(measured, "a", 60.0) == [(("a",), [])]


def test_a_profile_stops_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time was looked at after whole rounds only: a slow model was measured many times as long as asked."""
    import torch

    from terapipe.runtime import profiler
    from tests.support.models import TINY, make_model

    clock = count()  # every look at it is a second later
    monkeypatch.setattr(profiler.time, "monotonic", lambda: float(next(clock)))
    measured = []
    slices = profiler.Profiler._slices
    monkeypatch.setattr(profiler.Profiler, "_slices", lambda self, p: measured.append(p) or slices(self, p))
    made = profiler.Profiler(make_model(TINY, torch.float32), layers=2, seq_len=32)
    profile = made.run(seconds=5.0)
    assert len(measured) < 8 < len(made.points)
    lengths = [s.length for s in profile.samples if s.kind == "forward" and not s.context]
    assert (min(lengths), max(lengths)) == (4, 32)
    assert any(s.context for s in profile.samples)
    assert {s.kind for s in profile.samples} == set(KINDS)
    assert FittedCost(profile).forward(StageSpec(2), 1, 12, 8) > 0
