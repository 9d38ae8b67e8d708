"""Writes the table of longest sequences into docs/memory.md.

    python docs/longest.py

Each is found and planned anew, which takes some minutes. Text by hand stays: only what is between the marks is written.
"""

import re
from pathlib import Path

import terapipe as tp

PAGE = Path(__file__).resolve().parent / "memory.md"
CASES = (
    ("llama3-8b", "a100:1", "sgd"),
    ("llama3-8b", "g6e.48xlarge:1", "adamw"),
    ("llama3-8b", "dgx-a100:1", "adamw"),
    ("llama3-8b", "dgx-h100:1", "adamw"),
    ("llama3-70b", "g6e.48xlarge:8", "adamw"),
    ("llama3-70b", "dgx-h100:8", "adamw"),
)
HEADER = ("model", "cluster", "optimizer", "without offload", "seconds", "with offload", "seconds")


def longest(model: str, cluster: str, optimizer: str, offload: str) -> tuple[str, str]:
    """Tokens of the longest sequence that fits, and seconds of its step.

    Args:
        model: a preset.
        cluster: a name.
        optimizer: whose state is counted.
        offload: ``"none"`` or ``"auto"``.
    """
    try:
        best = tp.longest(model, cluster, optimizer=optimizer, offload=offload)
    except ValueError as error:
        if "no plan fits" not in str(error):
            raise
        return "nothing", ""
    return f"{best.plan.seq_len / 1000:,.0f}k", f"{best.step_time:,.0f}"


def row(model: str, cluster: str, optimizer: str) -> str:
    """One line of the table."""
    without, beside = (longest(model, cluster, optimizer, offload) for offload in ("none", "auto"))
    return f"| {' | '.join((model, f'`{cluster}`', optimizer, *without, *beside))} |"


if __name__ == "__main__":
    lines = [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER), *(row(*case) for case in CASES)]
    table = "<!-- longest -->\n\n" + "\n".join(lines) + "\n\n<!-- end of longest -->"
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub("<!-- longest -->.*?<!-- end of longest -->", lambda _: table, text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")
