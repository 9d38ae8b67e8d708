"""A plan made with the measured link against one made as if it were free: two hosts, 100 Mbit/s and 5 ms apart."""

from dataclasses import replace
from statistics import median

from benchmarks.harness import arguments, pin, race, report, training
from terapipe import GPT, GPTConfig, Plan, Profile, plan, simulate
from terapipe.planning import FittedCost
from terapipe.runtime import Profiler, under_torchrun
from tests.support.hosts import finish, hosts, torchrun, why_not

TOKENS = 2048
CONFIG = GPTConfig(layers=8, hidden=256, heads=8, vocab=256, max_seq_len=TOKENS)
RATE, DELAY = "100mbit", "5ms"


def planned(profile: Profile) -> Plan:
    return plan(None, profile, batch_size=1, seq_len=profile.seq_len, dp=1, pp=2, tp=1, recompute=False).plan


def plans(profile: Profile) -> dict[str, Plan]:
    return {"with the measured link": planned(profile), "as if it were free": planned(replace(profile, transfers=()))}


def on_host(quick: bool) -> None:
    """What the rank of each host runs; the first reports."""
    pin(0)
    profiler = Profiler(GPT(CONFIG), layers=CONFIG.layers // 4, seq_len=TOKENS // 2 if quick else TOKENS)
    together = profiler.transport.gather
    profile = together(profiler.run(5.0 if quick else 30.0))[0]
    tried = together(plans(profile))[0]
    times = race({name: training(CONFIG, cut) for name, cut in tried.items()}, 3 if quick else 15)
    if profiler.transport.rank == 0:
        show(profile, tried, times)


def show(profile: Profile, tried: dict[str, Plan], times: dict[str, list[float]]) -> None:
    cost = FittedCost(profile)
    predicted = {name: simulate(cut, profile).makespan for name, cut in tried.items()}
    rows = [
        [name, text(cut), predicted[name], min(times[name]), predicted[name] / min(times[name]), median(times[name])]
        for name, cut in tried.items()
    ]
    ours, theirs = tried
    figures = {
        "speedup": min(times[theirs]) / min(times[ours]),
        "speedup_of_medians": median(times[theirs]) / median(times[ours]),
        "speedup_predicted": predicted[theirs] / predicted[ours],
        "predicted": predicted[ours],
        "predicted_as_if_free": predicted[theirs],
        "megabyte_ms": 1e3 * float(cost.transfer(0, 1, 1, (1 << 20) / (4 * CONFIG.hidden))),
    }
    header = ("planned", "plan", "predicted s", "best measured s", "ratio", "median measured s")
    title = (__doc__ or "") + (f" Quick: {profile.seq_len} tokens only." if profile.seq_len < TOKENS else "")
    report(title, header, rows, figures)


def text(cut: Plan) -> str:
    lengths = cut.lengths[0]
    return f"{cut.order}, chunks per rank: {cut.chunks}, {len(lengths)} slices of {min(lengths)} to {max(lengths)}"


def main() -> None:
    quick = arguments(__doc__ or "").quick
    if under_torchrun():
        on_host(quick)
    elif reason := why_not():
        raise SystemExit(f"this benchmark makes two hosts of one machine: {reason}")
    else:
        with hosts(2, RATE, DELAY) as two:
            options = ["--quick"] if quick else []
            print("".join(finish(torchrun(two, "-m", "benchmarks.slow_link", *options), 900.0)).strip())
