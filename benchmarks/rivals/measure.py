"""A training step of ours against every rival's: same model, same two cores, gradients checked first."""

import logging
import os
import warnings

from benchmarks.harness import arguments, on_ranks, summary, table
from benchmarks.rivals import environment, link
from benchmarks.rivals.contest import Result, contest
from benchmarks.rivals.entrants import BY_SEQUENCES, DEEPSPEED, ENTRANTS, HEADER, LONG, figures_of, present, rows_of
from terapipe.runtime import under_torchrun

TOKENS, LONG_TOKENS, QUICK_TOKENS = 2048, 8192, 512
ROUNDS = {1: 4, 2: 3, 4: 2, 8: 1, 16: 1}  # by sequences
LONG_ROUNDS = 2
PARTS = ("sequences", "long", "link")


def measure(names: tuple[str, ...], sequences: int, tokens: int, rounds: int) -> dict[str, Result]:
    """On each rank."""
    calm()
    return contest({name: ENTRANTS[name] for name in present(names)}, sequences, tokens, rounds)


def calm() -> None:
    """Warnings of five libraries would hide the table."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def on_one_machine(parts: list[str], quick: bool) -> dict[str, float]:
    """Prints one table, by sequences and by length."""
    cases: list[tuple[tuple[str, ...], int, int, int]] = []
    if "sequences" in parts:
        tokens = QUICK_TOKENS if quick else TOKENS
        cases = [(names, n, tokens, 1 if quick else ROUNDS[n]) for n, names in BY_SEQUENCES.items()]
        cases = cases[:2] if quick else cases
    if "long" in parts and not quick:
        cases.append((LONG, 1, LONG_TOKENS, LONG_ROUNDS))
    rows: list[list[object]] = []
    figures: dict[str, float] = {}
    for names, sequences, tokens, rounds in cases:
        results: dict[str, Result] = on_ranks(2, measure, names, sequences, tokens, rounds)
        rows += rows_of(results, sequences, tokens)
        figures |= figures_of(results, f"{sequences}_{tokens}" if tokens == LONG_TOKENS else f"{sequences}")
    if rows:
        table((__doc__ or "") + (f" Quick: {QUICK_TOKENS} tokens only." if quick else ""), HEADER, rows)
    return figures


def main() -> None:
    options = arguments(__doc__ or "", parts=PARTS, single="over a link, one sequence only")
    os.environ.update(environment.SETTINGS)
    link_tokens = QUICK_TOKENS if options.quick else TOKENS
    if under_torchrun():
        calm()
        link.on_host(link_tokens, options.single, options.quick)
    if not environment.has_deepspeed():
        reason = environment.why_not()
        if reason is None:
            environment.run_there()
        print(f"{DEEPSPEED} is left out: {reason}\n")
    parts = options.part or (PARTS[:1] if options.quick else PARTS)
    figures = on_one_machine(parts, options.quick)
    if "link" in parts:
        figures |= link.measure(link_tokens, options.quick)
    summary(figures)
