"""Predicted against measured step times: one profile, many plans, two stages of this machine."""

from statistics import median

from benchmarks.harness import arguments, on_ranks, race, report, training
from terapipe import GPT, PRESETS, Plan, Profile, plan, simulate
from terapipe.planning import FittedCost
from terapipe.runtime import Profiler

CONFIG = PRESETS["gpt-small"]
CUTS, CHUNKED = (0, 3, 6), (0, 1, 3, 4, 6)


def even(tokens: int, batch: int, slices: int, order: str, chunks: int = 1) -> Plan:
    cuts = CHUNKED if chunks == 2 else CUTS
    return Plan.uniform(
        batch_size=batch, seq_len=tokens, num_slices=slices, boundaries=cuts, order=order, chunks=chunks
    )


def planned(profile: Profile, batch: int, order: str) -> Plan:
    seq_len = profile.seq_len
    return plan(
        None, profile, batch_size=batch, seq_len=seq_len, dp=1, pp=2, tp=1, order=order, chunks=1, recompute=False
    ).plan


def plans(profile: Profile, quick: bool) -> dict[str, Plan]:
    tokens = profile.seq_len
    found = {f"1 sequence, {n} even slices": even(tokens, 1, n, "terapipe") for n in ((1, 4, 8) if quick else COUNTS)}
    found["1 sequence, planned"] = planned(profile, 1, "terapipe")
    found["1 sequence, planned, deferred"] = planned(profile, 1, "terapipe-deferred")
    if quick:
        return found
    found["1 sequence, 8 even slices, 2 chunks"] = even(tokens, 1, 8, "terapipe", 2)
    found["2 sequences, gpipe"] = even(tokens, 2, 1, "gpipe")
    found["2 sequences, 1f1b"] = even(tokens, 2, 1, "1f1b")
    found["2 sequences, 4 even slices, 1f1b"] = even(tokens, 2, 4, "terapipe-1f1b")
    found["2 sequences, planned, 1f1b"] = planned(profile, 2, "terapipe-1f1b")
    return found


COUNTS = (1, 2, 4, 6, 8, 12, 16)


def measure(quick: bool) -> tuple[list[float], dict[str, tuple[float, float, float]]]:
    """Errors on held-out samples; for each plan predicted seconds, and the median and best of those measured.

    Machines drift, so the profile's rounds and the plans' take turns. What is planned is planned with the first ones.
    """
    tokens = 1024 if quick else 2048
    profiler = Profiler(GPT(CONFIG), layers=3, seq_len=tokens)
    early = profiler.transport.gather(profiler.run(5.0 if quick else 20.0))[0]
    tried = profiler.transport.gather(plans(early, quick))[0]
    contenders = {name: training(CONFIG, cut) for name, cut in tried.items()}
    times: dict[str, list[float]] = {name: [] for name in tried}
    names = list(contenders)
    for turn in range(2 if quick else 10):
        profiler.round()
        names = names[5:] + names[:5]  # whoever comes first after the profiler finds the memory in another state
        for name, seconds in race({name: contenders[name] for name in names}, 1, warmup=int(turn == 0)).items():
            times[name] += seconds
    profile = profiler.transport.gather(profiler.profile())[0]
    return FittedCost(profile).errors(), {
        name: (simulate(cut, profile).makespan, median(times[name]), min(times[name])) for name, cut in tried.items()
    }


def main() -> None:
    quick = arguments(__doc__ or "").quick
    errors, found = on_ranks(2, measure, quick)
    rows: list[list[object]] = [[name, p, best, p / best, m, p / m] for name, (p, m, best) in found.items()]
    off = [abs(p / best - 1) for p, _, best in found.values()]
    even_ones = [best for name, (_, _, best) in found.items() if name.startswith("1 seq") and name.endswith("slices")]
    figures = {
        "worst": max(off),
        "median": median(off),
        "plan_over_best_uniform": found["1 sequence, planned"][2] / min(even_ones),
        "held_out": max(map(abs, errors)),
        "worst_of_medians": max(abs(p / m - 1) for p, m, _ in found.values()),
        "median_of_medians": median(abs(p / m - 1) for p, m, _ in found.values()),
    }
    title = (__doc__ or "") + (" Quick: 1024 tokens only." if quick else "")
    report(title, ("plan", "predicted s", "best measured s", "ratio", "median measured s", "ratio"), rows, figures)
