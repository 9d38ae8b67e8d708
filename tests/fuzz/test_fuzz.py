"""A few random cases in `make test`, the same each time; `make fuzz` runs others by the thousand."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from terapipe import Plan
from tests.fuzz.breaks import BREAKS
from tests.fuzz.case import Case, Gpt, Own, Step, program
from tests.fuzz.check import CRASHED, EQUAL, REFUSED, WRONG, close_groups, outcome_of
from tests.fuzz.draw import draw, features, is_quick
from tests.fuzz.own import KINDS
from tests.fuzz.shrink import shrink
from tests.support.turns import DeadlockError, World

PLAN = Plan((1, 2), ((3, 1, 4, 2), (6, 4)), (0, 1, 2, 3), "terapipe-1f1b", recompute="full")
CASES = 20


@pytest.fixture(autouse=True)
def _processes_end() -> Iterator[None]:
    yield
    close_groups()


def test_random_cases() -> None:
    """Equal or refused."""
    quick = filter(is_quick, (draw(0, number) for number in range(10**6)))
    for case, _ in zip(quick, range(CASES), strict=False):
        outcome = outcome_of(case)
        assert outcome.kind in (EQUAL, REFUSED), f"{outcome.reason}\n{program(case)}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_is_exact(kind: str) -> None:
    """In three ranks and with documents; the plain form of the layer is a second one, which may be wrong, too."""
    case = Case(Own((kind,), balance="microbatch"), PLAN, (Step(1, True, ((0, 2, 9), (0,), (0, 5))),))
    assert outcome_of(case).kind == EQUAL


@pytest.mark.parametrize(
    ("name", "layers"),
    [("no-context-gradients", ("attention",)), ("wrong-scale", ("mlp",)), ("other-masks", ("dropout",))],
)
def test_a_broken_library_is_noticed(name: str, layers: tuple[str, ...]) -> None:
    """And the case is made smaller."""
    case = Case(Own(layers, tied=True), PLAN, (Step(1, True), Step(2)), dtype="float32")
    assert outcome_of(case).kind == EQUAL
    with BREAKS[name]():
        small, tried = shrink(case, lambda case: outcome_of(case).kind == WRONG)
    assert tried > 5
    assert (len(small.steps), small.dtype, small.model) == (1, "float64", Own(layers))
    assert len(small.plan.sizes) == small.plan.num_stages == small.plan.batch_size == 1
    assert len(small.plan.lengths[0]) == {"no-context-gradients": 2, "wrong-scale": 3, "other-masks": 1}[name]


def test_a_case_prints_as_a_program_that_runs_it() -> None:
    case = Case(Gpt(windows=(0, 3)), PLAN, (Step(3, documents=((0, 4), (0,), (0,))), Step()), evaluates=True)
    names: dict[str, object] = {}
    exec(program(case).replace("show(", "again = ("), names)
    assert names["again"] == case


@pytest.mark.exhaustive
def test_the_command() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "16", "--seed", "1", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"cases": 16' in done.stdout.splitlines()[-1]


def test_a_case_depends_on_seed_and_number_only() -> None:
    assert draw(3, 5) == draw(3, 5)
    assert draw(3, 5) != draw(4, 5)


def test_everything_is_drawn() -> None:
    counts = Counter(name for number in range(1500) for name in features(draw(1, number)))
    assert all(counts[f"layer {kind}"] for kind in KINDS)
    assert all(counts[name] for name in ("in sharded", "in tensor parallel", "2 replicas", "mode switched", "adapters"))


def test_an_error_of_the_library_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank of three; the other two are told to stop."""
    monkeypatch.setattr("terapipe.runtime.executor.Executor._backward", lambda self, action: 1 / 0)
    outcome = outcome_of(Case(Gpt(), PLAN))
    assert outcome.kind == CRASHED
    assert "ZeroDivisionError" in outcome.reason


def test_ranks_that_all_wait_are_noticed() -> None:
    with pytest.raises(DeadlockError, match="all others wait"):
        World(1, 2).run(lambda transport: transport.channel.wait(_receive(transport), 1 - transport.rank, "nothing"))


def _receive(transport: object) -> object:
    return transport.channel.receive((1,), torch.float32, 1 - transport.rank, "nothing")[1]  # type: ignore[attr-defined]
