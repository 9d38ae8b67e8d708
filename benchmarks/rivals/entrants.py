"""Who takes part in which case, and what a case's rows and figures are."""

from collections.abc import Mapping

from benchmarks.rivals import environment, pipelines, sharded
from benchmarks.rivals.contest import Entrant, Result

OURS, ULYSSES = ("ours: terapipe-v", "ours: terapipe-deferred"), ("DDP + Ulysses", "FSDP2 + Ulysses")
TORCH, DEEPSPEED, TENSOR = "torch InterleavedZeroBubble", "DeepSpeed", "tensor parallel"
CONTEXT, SHARDED = "FSDP2 + context_parallel", ("FSDP2", "FSDP2 + checkpointing")

ENTRANTS: dict[str, Entrant] = {
    OURS[0]: pipelines.ours(pipelines.folded_plan),
    OURS[1]: pipelines.ours(pipelines.straight_plan),
    "torch GPipe": pipelines.torch_pipeline("GPipe"),
    TORCH: pipelines.torch_pipeline("InterleavedZeroBubble"),
    DEEPSPEED: pipelines.deepspeed_pipeline,
    ULYSSES[0]: sharded.ulysses,
    ULYSSES[1]: sharded.fsdp_ulysses,
    CONTEXT: sharded.fsdp_context_parallel,
    TENSOR: sharded.tensor_parallel,
    SHARDED[0]: sharded.fsdp,
    SHARDED[1]: sharded.fsdp_checkpointing,
}

# Names in the JSON object; contenders of one name count by their best.
KEYS = {
    "torch GPipe": "torch",
    TORCH: "torch",
    DEEPSPEED: "deepspeed",
    ULYSSES[0]: "ulysses",
    ULYSSES[1]: "fsdp_ulysses",
    CONTEXT: "context_parallel",
    TENSOR: "tensor_parallel",
    SHARDED[0]: "fsdp",
    SHARDED[1]: "fsdp_checkpointing",
}

# By the number of sequences of 2048 tokens. The more there are, the longer a step takes and the fewer take part: with
# eight sequences nobody splits each of them over two ranks.
BY_SEQUENCES = {
    1: (*OURS, "torch GPipe", TORCH, DEEPSPEED, *ULYSSES, CONTEXT, TENSOR),
    2: (*OURS, TORCH, DEEPSPEED, *ULYSSES, TENSOR, *SHARDED),
    4: (*OURS, TORCH, DEEPSPEED, ULYSSES[1], *SHARDED),
    8: (OURS[0], TORCH, DEEPSPEED, *SHARDED),
    16: (OURS[0], DEEPSPEED, SHARDED[1]),
}
LONG = (OURS[0], TORCH, DEEPSPEED, *ULYSSES, TENSOR)  # one sequence of 8192
# By the number of sequences; four of them over the slower links only.
OVER_A_LINK = {1: (*OURS, TORCH, DEEPSPEED, *ULYSSES, TENSOR), 4: (*OURS, DEEPSPEED, ULYSSES[1], SHARDED[0])}

HEADER = (
    "sequences",
    "tokens",
    "contender",
    "best s",
    "tokens/s",
    "MiB",
    "time over ours",
    "memory over ours",
    "error",
)


def present(names: tuple[str, ...]) -> tuple[str, ...]:
    """Without DeepSpeed, where it is not installed."""
    return tuple(name for name in names if name != DEEPSPEED or environment.has_deepspeed())


def ours_of(results: Mapping[str, Result]) -> Result:
    """Our fastest: as the planner would choose between two plans."""
    return min((results[name] for name in OURS if name in results), key=lambda result: result.seconds)


def rows_of(results: Mapping[str, Result], sequences: int, tokens: int) -> list[list[object]]:
    ours, rows = ours_of(results), list[list[object]]()
    for name, result in results.items():
        if result.reason:
            rows.append([sequences, tokens, name, f"not compared: {result.reason}", *[""] * (len(HEADER) - 4)])
            continue
        speed, mib = round(sequences * tokens / result.seconds), round(result.peak / 2**20)
        ratios = result.seconds / ours.seconds, result.peak / ours.peak
        rows.append([sequences, tokens, name, result.seconds, speed, mib, *ratios, f"{result.error:.0e}"])
    return rows


def figures_of(results: Mapping[str, Result], case: str) -> dict[str, float]:
    """Every rival's time over ours, and its memory."""
    ours, figures = ours_of(results), {f"ours_seconds_{case}": ours_of(results).seconds}
    for key in dict.fromkeys(KEYS.values()):
        timed = [result for name, result in results.items() if KEYS.get(name) == key and not result.reason]
        if timed:
            fastest = min(timed, key=lambda result: result.seconds)
            figures[f"{key}_{case}"] = fastest.seconds / ours.seconds
            figures[f"{key}_memory_{case}"] = fastest.peak / ours.peak
    return figures
