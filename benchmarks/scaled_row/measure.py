"""A row of the paper at small scale: profile, plan, run; the same simulator as for the published settings."""

from benchmarks.harness import arguments, best, on_ranks, race, report, training
from benchmarks.prediction.measure import CONFIG, even, planned
from terapipe import GPT, simulate
from terapipe.runtime import Profiler

TOKENS, BATCH = 2048, 2  # as in settings 9 and 10


def measure(quick: bool) -> dict[str, tuple[float, float]]:
    """Predicted and best measured seconds of GPipe and of the planned slices."""
    profiler = Profiler(GPT(CONFIG), layers=3, seq_len=TOKENS)
    profile = profiler.transport.gather(profiler.run(10.0 if quick else 25.0))[0]
    plan = profiler.transport.gather(planned(profile, BATCH, "terapipe"))[0]
    plans = {
        "GPipe": even(TOKENS, BATCH, 1, "gpipe"),
        f"TeraPipe, {len(plan.lengths[0])} planned slices of {plan.sizes[0]} sequences": plan,
    }
    times = best(race({name: training(CONFIG, p) for name, p in plans.items()}, 2 if quick else 12))
    return {name: (simulate(p, profile).makespan, times[name]) for name, p in plans.items()}


def main() -> None:
    found: dict[str, tuple[float, float]] = on_ranks(2, measure, arguments(__doc__ or "").quick)
    rows: list[list[object]] = [[name, p, m, p / m] for name, (p, m) in found.items()]
    (gpipe_p, gpipe_m), (ours_p, ours_m) = found.values()
    figures = {
        "speedup_predicted": gpipe_p / ours_p,
        "speedup_measured": gpipe_m / ours_m,
        "worst": max(abs(p / m - 1) for p, m in found.values()),
    }
    report(__doc__ or "", ("schedule", "predicted s", "measured s", "ratio"), rows, figures)
