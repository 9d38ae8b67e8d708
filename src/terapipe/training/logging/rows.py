"""The rows of a run: what is known of a step, by names."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Rows = Sequence[Row]
_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_second": "speed/tokens_per_second",
    "seconds": "speed/seconds",
    "predicted": "speed/predicted",
    "idle": "speed/idle",
    "eval_loss": "eval/loss",
    "perplexity": "eval/perplexity",
}


def flat(row: Row) -> dict[str, float]:
    """The numbers of a row by the names they have in TensorBoard and the trackers."""
    found = {name: row[key] for key, name in _NAMES.items() if row.get(key) is not None}
    ranks = {f"memory/rank{rank}": size for rank, size in enumerate(row.get("memory") or ()) if size is not None}
    return found | ranks


def finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: null stands for them."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def values_of(rows: Rows, key: str) -> list[tuple[int, float]]:
    """Each step with its value; steps without one, or whose value is no finite number, are left out."""
    return [
        (row["step"], float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def memory_of(rows: Rows) -> list[tuple[int, list[float]]]:
    """Each step with the bytes of all ranks, where those are known."""
    return [(row["step"], row["memory"]) for row in rows if row.get("memory") and None not in row["memory"]]
