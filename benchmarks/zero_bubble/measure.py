"""Zero bubble over slices against 1F1B: idle share and peak memory of 8 simulated stages, and time on 2 real ones."""

from benchmarks.harness import arguments, best, on_ranks, race, summary, table, training
from terapipe import PRESETS, Cluster, Layout, Plan
from terapipe.scheduling import peaks, program
from terapipe.search import ClusterSource, PlanEvaluator, Request

RANKS, BATCH, SLICES, LAYOUT = 8, 16, 8, Layout(1, 8, 8)
MODELS = {"gpt3-175b": 2048, "llama3-70b": 32768}  # and the tokens of a sequence
ORDERS = ("1f1b", "terapipe-1f1b", "terapipe-zb", "terapipe-zb2", "terapipe-deferred", "terapipe-v")
REAL = ("terapipe-1f1b", "terapipe-zb", "terapipe-zb2")


def simulated(model: str, ends: bool) -> dict[str, tuple[float, list[int]]]:
    """For each order the idle share, and every rank's peak in bytes. Without ``ends`` all stages are alike."""
    source = ClusterSource(PRESETS[model], Cluster("dgx-h100:8"), ends)
    request = Request(BATCH, MODELS[model], dp=1, pp=RANKS, tp=LAYOUT.tp, microbatch_size=1)
    evaluator = PlanEvaluator(source, request, LAYOUT, "none")
    found = {}
    for order in ORDERS:
        lengths = evaluator.grid(1).equal_time(1 if order == "1f1b" else SLICES)
        plan = evaluator.plan(order, 1, lengths, chunks=2 if order == "terapipe-v" else 1)
        found[order] = evaluator.evaluate(plan).idle, peaks(program(plan), plan, evaluator.memory)
    return found


def tabulate(model: str) -> dict[str, float]:
    whole, alike = (simulated(model, ends) for ends in (True, False))
    base = whole["terapipe-1f1b"][1]
    rows = [
        (
            order,
            whole[order][0],
            alike[order][0],
            max(ranks) / 2**30,
            max(ranks) / max(base),
            max(mine / of_1f1b for mine, of_1f1b in zip(ranks, base, strict=True)),
        )
        for order, (_, ranks) in whole.items()
    ]
    header = ("order", "idle", "idle, equal stages", "peak GiB", "peak / 1F1B's", "most of any rank / its own")
    title = f"{model}, {BATCH} sequences of {MODELS[model]} tokens in {SLICES} slices, {LAYOUT} on H100, simulated"
    table(title, header, rows)
    figures: dict[str, float] = {}
    for order, idle, even, _, ratio, own in rows:
        name = order.removeprefix("terapipe-") + ("_whole" if order == "1f1b" else "")
        figures |= {f"idle_{name}": idle, f"idle_equal_{name}": even}
        figures |= {f"peak_{name}_over_1f1b": ratio, f"rank_{name}_over_1f1b": own}
    return figures


def measure(tokens: int, rounds: int) -> dict[str, float]:
    config = PRESETS["gpt-small"]
    plans = {
        order: Plan.uniform(batch_size=4, seq_len=tokens, num_slices=4, boundaries=(0, 3, 6), order=order)
        for order in REAL
    }
    return best(race({order: training(config, plan) for order, plan in plans.items()}, rounds))


def main() -> None:
    quick = arguments(__doc__ or "").quick
    figures = tabulate("gpt3-175b")
    figures |= {f"{name}_32k": value for name, value in tabulate("llama3-70b").items()}
    seconds = on_ranks(2, measure, *((256, 2) if quick else (1024, 24)))
    rows = [(order, s, seconds["terapipe-1f1b"] / s) for order, s in seconds.items()]
    table("4 sequences in 4 slices on two stages of this machine", ("order", "best s", "speedup"), rows)
    figures["speedup_real"] = seconds["terapipe-1f1b"] / seconds["terapipe-zb"]
    figures["speedup_real_zb2"] = seconds["terapipe-1f1b"] / seconds["terapipe-zb2"]
    summary(figures)
