"""``python -m tests.fuzz``: random cases, each against the plain model. The last line is one JSON object."""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.fuzz.breaks import BREAKS
from tests.fuzz.case import Case, program
from tests.fuzz.check import CRASHED, EQUAL, REFUSED, WRONG, Outcome, close_groups, outcome_of
from tests.fuzz.draw import draw, is_quick
from tests.fuzz.shrink import shrink
from tests.fuzz.workers import Finding, prepare, run, share_out

SHOWN = 5  # failures that are shrunk; the others are counted


def main() -> int:
    arguments = _arguments()
    print(
        f"SEED={arguments.seed} CASES={arguments.cases} SECONDS={arguments.seconds} JOBS={arguments.jobs}", flush=True
    )
    begun, totals, drawn, refusals = time.monotonic(), Counter[str](), Counter[str](), Counter[str]()
    failures, busy = list[tuple[int, Outcome]](), 0.0
    for number, outcome, names, seconds in _until_interrupted(_outcomes(arguments)):
        totals[outcome.kind] += 1
        drawn.update(names)
        busy += seconds
        if outcome.kind == REFUSED:
            refusals[re.sub(r"\d+", "N", outcome.reason)[:160]] += 1
        elif outcome.kind != EQUAL:
            failures.append((number, outcome))
            print(f"case {number} of seed {arguments.seed}: {outcome.kind}: {outcome.reason[-600:]}", flush=True)
            if arguments.stop:
                break
    done = time.monotonic() - begun
    for number, outcome in sorted(failures, key=lambda pair: pair[0])[:SHOWN]:
        _explain(arguments, number, outcome)
    _print_table(drawn, refusals, totals.total())
    summary = {
        "cases": totals.total(),
        "equal": totals[EQUAL],
        "wrong": totals[WRONG],
        "refused": totals[REFUSED],
        "crashed": totals[CRASHED],
        "cpu_seconds": round(busy, 1),
        "seconds": round(done, 1),
    }
    print(json.dumps(summary), flush=True)
    return 1 if failures or not totals[EQUAL] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="repeats a run")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further case is begun")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; 0 for this one alone")
    parser.add_argument("--quick", action="store_true", help="without types of transformers and other processes")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--break", dest="broken", choices=BREAKS, help="break the library first, to see it noticed")
    return parser.parse_args()


def _until_interrupted(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Ctrl-C ends a run early, with what it has seen."""
    try:
        yield from findings
    except KeyboardInterrupt:
        print("interrupted", flush=True)


def _outcomes(arguments: argparse.Namespace) -> Iterator[Finding]:
    """What came of each case, in the order in which they end."""
    numbers: Sequence[int] = range(arguments.first, arguments.first + arguments.cases)
    if arguments.quick:
        numbers = [number for number in numbers if is_quick(draw(arguments.seed, number))]
    end = time.monotonic() + arguments.seconds
    if not arguments.jobs:
        prepare(arguments.broken)
        for number in numbers:
            if time.monotonic() > end:
                break
            yield run(arguments.seed, number)
        close_groups()
        return
    yield from share_out(numbers, arguments.seed, arguments.jobs, arguments.broken, end)


def _explain(arguments: argparse.Namespace, number: int, outcome: Outcome) -> None:
    """Prints the smallest case that fails alike, as a program."""
    if arguments.jobs:
        prepare(arguments.broken)
        arguments.jobs = 0
    last = [outcome]

    def fails(case: Case) -> bool:
        other = outcome_of(case)
        alike = other.kind == outcome.kind and (
            outcome.kind == WRONG or other.reason.partition(":")[0] == outcome.reason.partition(":")[0]
        )
        last[0] = other if alike else last[0]
        return alike

    case = draw(arguments.seed, number)
    small, tried = shrink(case, fails)
    close_groups()
    print(f"\ncase {number} of seed {arguments.seed}, {outcome.kind}, as a program:\n\n{program(case)}")
    print(f"the smallest of {tried} that fail alike, with: {last[0].reason[-1500:]}\n\n{program(small)}", flush=True)


def _print_table(drawn: Counter[str], refusals: Counter[str], total: int) -> None:
    width = max(map(len, drawn), default=0)
    for name, count in sorted(drawn.items()):
        print(f"{name:{width}} {count:6} {100 * count / total:5.1f} %")
    for reason, count in refusals.most_common():
        print(f"refused {count} x {reason}")


if __name__ == "__main__":
    sys.exit(main())
