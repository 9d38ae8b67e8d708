"""Random cases. The same seed and number give the same case, whatever was drawn before."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from terapipe import ORDERS, Plan
from terapipe.planning.recompute import MODES
from tests.fuzz.case import Case, Documents, Gpt, HuggingFace, Own, Step
from tests.fuzz.own import KINDS
from tests.fuzz.plain import ALL_OBJECTIVES, PAIRS, TOKENS

TOKENS_AT_MOST = 20
TYPES = ("llama", "gpt2", "qwen2", "qwen3", "mistral", "phi", "gpt_neox", "opt", "olmo2", "gemma2", "gpt_oss", "bloom")
WITHOUT_DOCUMENTS = ("opt", "bloom")  # refused by name, after a check that takes long
FLUSH = ("gpipe", "terapipe", "terapipe-deferred", "terapipe-v")  # all forwards come before the first backward
FROZEN = ("embedding", "head", "norm", "bias", "layers.0", "layers.1", "weight", ".q", "qkv", "down", "up")


def draw(seed: int, number: int) -> Case:
    """One of the cases of a run.

    Args:
        seed: Of the run.
        number: Of the case.
    """
    rng = random.Random(f"{seed}/{number}")
    while True:
        try:
            return _draw(rng)
        except ValueError:  # there is no such plan
            continue


def _draw(rng: random.Random) -> Case:
    kind = rng.choices(("gpt", "own", "hf", "processes"), (30, 58, 10, 1.2))[0]
    objective = "cross-entropy" if rng.random() < 0.5 else rng.choice(ALL_OBJECTIVES)
    if kind == "hf" and objective == "fused":  # some types have a head with a bias
        objective = "cross-entropy"
    whole = "over the batch" in objective
    needs_flush = whole or objective == TOKENS
    replicas = 2 if not whole and kind != "processes" and rng.random() < 0.12 else 1
    model = _model(rng, kind)
    flush = needs_flush or getattr(model, "balance", "") in ("batch", "replicas")
    plan = _plan(rng, kind, flush and rng.random() < 0.97, even_rows=objective in PAIRS, replicas=replicas)
    case = Case(model, plan, (Step(),), objective, replicas=replicas)
    if kind == "processes":
        case = _over_processes(rng, case)
    return _with_options(rng, replace(case, steps=_steps(rng, case)))


def _model(rng: random.Random, kind: str) -> Gpt | Own | HuggingFace:
    if kind == "hf":
        return HuggingFace(rng.choice(TYPES), lora=rng.random() < 0.25)
    if kind in ("gpt", "processes"):
        windows = tuple(rng.choice((0, 0, 1, 2, 3, 5, 8, 13)) for _ in range(rng.choice((1, 1, 2, 3))))
        windows = windows if rng.random() < 0.5 else (0,)
        return Gpt(rng.choice((4, 2, 1)), rng.random() < 0.5, windows, rng.choice((None, None, None, 3, 8)))
    layers = tuple(_layer(rng) for _ in range(rng.randint(1, 4)))
    balance = rng.choice(("", "microbatch", "batch", "replicas")) if any("experts" in x for x in layers) else ""
    return Own(layers, rng.random() < 0.4, balance)


def _layer(rng: random.Random) -> str:
    """One kind, or two side by side."""
    return "+".join(rng.choice(list(KINDS)) for _ in range(rng.choice((1, 1, 1, 2))))


# Plans


def _plan(rng: random.Random, kind: str, flush: bool, *, even_rows: bool, replicas: int) -> Plan:
    order = ORDERS[rng.choice(FLUSH if flush else sorted(ORDERS))]
    chunks = order.chunks or rng.choice((1, 1, 2, 3))
    ranks = rng.randint(1, max(4 // chunks, 1)) if kind != "processes" else 1
    stages = min(ranks * chunks, 4) // chunks * chunks
    widths = [rng.choice((1, 1, 2)) for _ in range(stages)]
    if kind == "hf":
        widths = _widths(rng, stages)
    if stages > 1 and rng.random() < 0.2:
        for end in rng.choice([(0,), (-1,), (0, -1)] if stages > 2 else [(0,), (-1,)]):
            inner = widths[1] if len(widths) > 2 or end == 0 else widths[0]
            if kind != "hf":
                widths[end] = 0
            elif inner:
                widths[end], widths[1 if end == 0 else -2] = 0, widths[1 if end == 0 else -2] + widths[end]
    boundaries = tuple(sum(widths[:k]) for k in range(stages + 1))
    sizes, lengths = _cuts(rng, order.sliced, even_rows)
    if kind == "processes":
        lengths = tuple(tuple(2 * n for n in row) for row in lengths)
    plan = Plan(sizes, lengths, boundaries, order.name, chunks)
    return replace(plan, **_by_slice(rng, plan))


def _widths(rng: random.Random, stages: int) -> list[int]:
    """Of four layers."""
    edges = [0, *sorted(rng.sample(range(1, 4), stages - 1)), 4]
    return [b - a for a, b in pairwise(edges)]


def _cuts(rng: random.Random, sliced: bool, even_rows: bool) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    microbatches = rng.choice((1, 1, 2, 2, 3))
    tokens = rng.randint(1, TOKENS_AT_MOST)
    sizes = tuple(2 if even_rows else rng.randint(1, 2) for _ in range(microbatches))
    return sizes, tuple(_slicing(rng, tokens) if sliced else (tokens,) for _ in range(microbatches))


def _slicing(rng: random.Random, tokens: int) -> tuple[int, ...]:
    cuts = rng.sample(range(1, tokens), min(rng.choice((0, 1, 2, 2, 3, 4)), tokens - 1)) if tokens > 1 else []
    return tuple(b - a for a, b in pairwise([0, *sorted(cuts), tokens]))


def _by_slice(rng: random.Random, plan: Plan) -> dict[str, Any]:
    """Recomputation and offload: none, the same for all, by stage, or by stage and slice."""
    count = sum(map(len, plan.lengths))

    def of_slices(values: Sequence[Any]) -> Any:
        return tuple(rng.choice(values) for _ in range(count)) if rng.random() < 0.5 else rng.choice(values)

    def of_stages(values: Sequence[Any]) -> Any:
        if rng.random() < 0.6:
            return rng.choice(values)
        return tuple(of_slices(values) for _ in range(plan.num_stages))

    return {
        "recompute": of_stages(MODES) if rng.random() < 0.65 else "none",
        "offload": of_stages((True, False)) if rng.random() < 0.3 else False,
        "offload_kv": rng.random() < 0.2,
    }


# Batches and options


def _steps(rng: random.Random, case: Case) -> tuple[Step, ...]:
    steps = []
    for _ in range(rng.choice((1, 1, 1, 1, 2))):
        other = _other_plan(rng, case) if rng.random() < 0.12 else None
        plan = other or case.plan
        slow = isinstance(case.model, HuggingFace) and case.model.type in WITHOUT_DOCUMENTS
        documents = _documents(rng, plan, case.replicas) if rng.random() < 0.3 and not slow else None
        steps.append(Step(rng.randrange(1000), rng.random() < 0.5, documents, other))
    return tuple(steps)


def _documents(rng: random.Random, plan: Plan, replicas: int) -> Documents:
    def row() -> tuple[int, ...]:
        starts = range(1, plan.seq_len)
        return (0, *sorted(rng.sample(starts, min(rng.choice((0, 1, 2, 4)), len(starts)))))

    return tuple(row() for _ in range(plan.batch_size * replicas))


def _other_plan(rng: random.Random, case: Case) -> Plan:
    """Another cut of the same number of rows and tokens."""
    plan, sliced = case.plan, ORDERS[case.plan.order].sliced
    rows = tuple(_slicing(rng, plan.seq_len) if sliced else row for row in plan.lengths)
    if case.ranks != "turns":
        rows = plan.lengths
    return plan.recut(rows)


def _with_options(rng: random.Random, case: Case) -> Case:
    is_hf, in_processes = isinstance(case.model, HuggingFace), case.ranks != "turns"
    dtype = rng.choices(("float64", "float32", "bfloat16"), (80, 12, 8))[0] if not is_hf else "float64"
    has_experts = any("experts" in kind for kind in getattr(case.model, "layers", ()))
    if has_experts and dtype == "bfloat16":
        dtype = "float64"  # rounding may choose another expert
    frozen = tuple(rng.sample(FROZEN, rng.choice((1, 1, 2)))) if rng.random() < 0.15 else ()
    switches = case.objective == TOKENS and rng.random() < 0.6
    fused = rng.random() < (0.98 if "light" in case.plan.recompute_modes else 0.85)  # light is refused without it
    return replace(
        case,
        dtype=dtype,
        autocast=dtype == "float32" and not in_processes and not has_experts and rng.random() < 0.3,
        frozen=frozen,
        training=rng.random() < 0.85,
        switches=switches,
        evaluates=rng.random() < 0.15,
        fused=fused,
        verifies=not is_hf and rng.random() < 0.01,
    )


def _over_processes(rng: random.Random, case: Case) -> Case:
    ranks = rng.choice(("tensor parallel", "sharded"))
    plain = "over the batch" in case.objective or case.objective in ("fused", TOKENS, "distillation")
    return replace(
        case,
        model=replace(case.model, kv_heads=4, head_dim=None),
        ranks=ranks,
        replicas=2 if ranks == "sharded" else 1,
        objective="cross-entropy" if plain else case.objective,
    )


def is_quick(case: Case) -> bool:
    """Whether it needs neither transformers nor other processes, which take long to begin with."""
    return case.ranks == "turns" and not isinstance(case.model, HuggingFace)


def features(case: Case) -> list[str]:
    """What a run counts."""
    plan, model = case.plan, case.model
    counts = [
        f"model {type(model).__name__}",
        f"order {plan.order}",
        f"{plan.num_stages} stages",
        f"{plan.num_ranks} ranks",
        f"{len(plan.sizes)} microbatches",
        f"{max(map(len, plan.lengths))} slices",
        *(f"recompute {mode}" for mode in plan.recompute_modes),
        f"objective {case.objective}",
        f"dtype {case.dtype}",
        f"{case.replicas} replicas",
        f"in {case.ranks}",
        f"{len(case.steps)} steps",
    ]
    flags = {
        "chunks": plan.chunks > 1,
        "bare ends": plan.has_bare_ends,
        "recompute by slice": isinstance(plan.recompute, tuple),
        "offload": plan.offload is not False,
        "offload of keys and values": plan.offload_kv,
        "documents": any(step.documents for step in case.steps),
        "a batch's own plan": any(step.plan for step in case.steps),
        "labels ignored": any(step.ignored for step in case.steps),
        "autocast": case.autocast,
        "frozen": bool(case.frozen),
        "evaluation mode": not case.training,
        "mode switched": case.switches,
        "evaluated first": case.evaluates,
        "not fused": not case.fused,
        "verified": case.verifies,
        "tied": getattr(model, "tied", False),
        "windows": getattr(model, "windows", (0,)) != (0,),
        "auxiliary loss": bool(getattr(model, "balance", "")),
        "adapters": getattr(model, "lora", False),
    }
    kinds = {part for kind in getattr(model, "layers", ()) for part in kind.split("+")}
    types = [f"type {model.type}"] if isinstance(model, HuggingFace) else []
    return [*counts, *(name for name, is_so in flags.items() if is_so), *(f"layer {kind}" for kind in kinds), *types]
