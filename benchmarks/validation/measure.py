"""What a rank does before its first step: seconds to list a schedule and to prove it, and microseconds per action."""

from functools import partial

from benchmarks.harness import arguments, best, race, report
from terapipe import Plan, schedule, validate

SIZES = ((16, 8, 8), (16, 16, 8), (16, 32, 8), (96, 32, 16))  # stages, microbatches, slices


def main() -> None:
    quick = arguments(__doc__ or "").quick
    rows: list[list[object]] = []
    figures: dict[str, object] = {}
    for stages, microbatches, slices in SIZES:
        for order in ("terapipe", "terapipe-1f1b"):
            cuts = range(stages + 1)
            plan = Plan.uniform(batch_size=microbatches, seq_len=2048, num_slices=slices, boundaries=cuts, order=order)
            made = schedule(plan)
            count = sum(map(len, made.ranks))
            contenders = {"schedule": partial(schedule, plan), "validate": partial(validate, made)}
            times = best(race(contenders, 1 if quick else 5))
            each = 1e6 * times["validate"] / count
            name = f"{stages} x {microbatches} x {slices}"
            rows.append([order, name, count, times["schedule"], times["validate"], each])
            figures |= {"actions": count, "schedule_seconds": times["schedule"], "validate_seconds": times["validate"]}
            figures |= {"microseconds_per_action": each}
    header = ("order", "stages x microbatches x slices", "actions", "schedule, s", "validate, s", "validate, us/action")
    report(__doc__ or "", header, rows, figures)
