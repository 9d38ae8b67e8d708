"""Draws the pictures of the documentation: simulated steps, the same on every machine.

python docs/pictures.py
"""

from collections.abc import Mapping
from pathlib import Path

import terapipe as tp

FOLDER = Path(__file__).resolve().parent / "pictures"
MODEL = tp.GPTConfig(layers=8, hidden=4096, heads=32, vocab=32000, max_seq_len=8192)


def step(order: str, *, num_slices: int = 1, batch_size: int = 1, pp: int = 4, chunks: int = 1) -> tp.Timeline:
    """One simulated step of a small model on one host, without embedding and head: all stages are equal."""
    layers = range(0, MODEL.layers + 1, MODEL.layers // (pp * chunks))
    plan = tp.Plan.uniform(
        batch_size=batch_size, seq_len=8192, boundaries=layers, num_slices=num_slices, order=order, chunks=chunks
    )
    return tp.estimate(plan, "dgx-h100:1", model=MODEL, layers_only=True).simulate()


def pictures() -> dict[str, Mapping[str, tp.Timeline]]:
    """For each file, its timelines, which share one scale of time."""
    return {
        "gpipe-terapipe.svg": {
            "gpipe: one sequence, whole": step("gpipe"),
            "terapipe: the same sequence in 8 slices": step("terapipe", num_slices=8),
        },
        "1f1b-over-slices.svg": {
            "terapipe: 3 sequences of 4 slices, all forwards first": step("terapipe", num_slices=4, batch_size=3),
            "terapipe-1f1b: the same slices": step("terapipe-1f1b", num_slices=4, batch_size=3),
        },
        "zero-bubble.svg": {
            "terapipe-1f1b: 3 sequences of 4 slices": step("terapipe-1f1b", num_slices=4, batch_size=3),
            "terapipe-zb: the same slices in the same memory": step("terapipe-zb", num_slices=4, batch_size=3),
            "terapipe-zb2: with twice the lead": step("terapipe-zb2", num_slices=4, batch_size=3),
        },
        "v-order.svg": {
            "terapipe: one stage per rank": step("terapipe", num_slices=8, pp=2),
            "terapipe-v: two stages per rank, there and back": step("terapipe-v", num_slices=8, pp=2, chunks=2),
        },
    }


def draw(timelines: Mapping[str, tp.Timeline]) -> str:
    (name, first), *others = timelines.items()
    return first.to_svg(name=name, others=dict(others)) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, timelines in pictures().items():
        (FOLDER / name).write_text(draw(timelines), encoding="utf-8")
