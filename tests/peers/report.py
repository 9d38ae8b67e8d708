"""Cases sorted by what comes out of them: equal, refused when the trainer is made, wrong, or not comparable."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.peers.cases import Case
from tests.peers.runs import Outcome, run
from tests.support.ranks import Ranks

EQUAL, REFUSED, WRONG, ALONE = "equal", "refused", "wrong", "not comparable"
BOUND = 1e-4  # TRL computes log-probabilities in float32, of which preferences are small differences
FLOOR = 1e-5  # what is as good as zero
ROUNDING = 4.0  # ours in bfloat16 may be so much further from the truth than the plain class is,
BFLOAT16 = 0.02  # or this far from the plain class
# Steps of functions: a share of tokens or pairs may turn over by rounding.
COUNTED = ("accurac", "clip_ratio", "clipped", "is_top1")


class Finding(NamedTuple):
    case: Case
    kind: str
    reason: str


class References:
    """What the plain class makes of a case, computed once for all cases that it is the same for."""

    def __init__(self) -> None:
        self._seen: dict[str, Outcome] = {}

    def __call__(self, case: Case, exact: bool = False) -> Outcome:
        checkpointing = case.defaults or case.model != "llama"  # it changes nothing but rounding in bfloat16
        plain = Case(case.kind, case.options, case.adapter, checkpointing, 1, case.defaults, case.model)
        key = f"{plain} {exact}"
        if key not in self._seen:
            self._seen[key] = run(plain, False, exact)
        return self._seen[key]


def judge(case: Case, found: Outcome, plain: Outcome, truth: Outcome | None) -> Finding:
    """``truth``: the plain class in float64, for a case in bfloat16."""
    if plain.stopped:
        return Finding(case, ALONE, f"the plain class: {plain.reason}")
    if found.stopped:
        is_refusal = found.stopped == "made" and found.reason.startswith(("ValueError", "UnsupportedModelError"))
        return Finding(case, REFUSED if is_refusal else WRONG, f"{found.stopped}: {found.reason}")
    differences = list(_differences(case, found, plain, truth))
    return Finding(case, WRONG if differences else EQUAL, "; ".join(differences))


def _differences(case: Case, found: Outcome, plain: Outcome, truth: Outcome | None) -> Iterator[str]:
    if len(found.logs) != len(plain.logs):
        yield f"{len(found.logs)} rows instead of {len(plain.logs)}"
        return
    for name in sorted({name for row in plain.logs for name in row}):
        ours, theirs = (_column(outcome, name) for outcome in (found, plain))
        exact = _column(truth, name) if truth else None
        scale = max([abs(value) for value in theirs if value == value] + [1.0 if name == "loss" else 0.0])
        if name.endswith(COUNTED) or any(part in name for part in COUNTED):
            scale = 10.0 if truth else max(scale, 1.0)
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            near = BOUND * scale + FLOOR
            if exact is not None:
                near = max(BFLOAT16 * scale, ROUNDING * abs(b - exact[step]))
                near += (
                    1e-3 if name in ("loss", "grad_norm") else BFLOAT16
                )  # others may be differences of large numbers
            if not (abs(a - b) <= near or (a != a and b != b)):
                yield f"{name} of step {step + 1} is {a:.6g} instead of {b:.6g}"
                break
    if truth is None:
        yield from _weights(found, plain)


def _column(outcome: Outcome, name: str) -> list[float]:
    """NaN where nothing was logged."""
    values = (row.get(name) for row in outcome.logs)
    return [float("nan") if value is None else float(value) for value in values]


def _weights(found: Outcome, plain: Outcome) -> Iterator[str]:
    if found.weights.keys() != plain.weights.keys():
        yield f"other weights: {sorted(found.weights.keys() ^ plain.weights.keys())[:2]}"
        return
    largest = max(weight.abs().max().item() for weight in plain.weights.values())
    for name, weight in plain.weights.items():
        error = (found.weights[name] - weight).abs().max().item() / largest
        if not error < 10 * BOUND:
            yield f"{name} is off by {error:.1e}"
            return


def findings(
    cases: list[Case], ranks: Callable[[int], Ranks], seen: Callable[[Finding], Any] = lambda finding: None
) -> list[Finding]:
    """Those of two stages are begun first, each while the plain class of it runs here."""
    plain, found = References(), []
    for case in cases:
        if case.stages > 1:
            group = ranks(case.stages)
            group.submit(run, case, True)
        truth = plain(case, exact=True) if case.defaults else None
        wanted = plain(case)
        if case.stages > 1:
            outcomes = group.results()
            group.in_order = all(isinstance(outcome, tuple) and outcome[2] != "trained" for outcome in outcomes)
            each = [_judged(case, outcome, wanted, truth) for outcome in outcomes]
            finding = next((one for one in each if one.kind == WRONG), each[0])
        else:
            finding = judge(case, run(case, True), wanted, truth)
        found.append(finding)
        seen(finding)
    return found


def _judged(case: Case, outcome: Any, plain: Outcome, truth: Outcome | None) -> Finding:
    if not isinstance(outcome, tuple):
        return Finding(case, WRONG, f"a rank ended: {outcome}")
    return judge(case, Outcome(*outcome), plain, truth)


def counts(found: list[Finding]) -> dict[str, int]:
    seen = Counter(finding.kind for finding in found)
    return {kind: seen[kind] for kind in (EQUAL, REFUSED, WRONG, ALONE)}
