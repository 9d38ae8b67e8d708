"""The same contest between two hosts of one machine, over a wire of some rate."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

import torch.distributed as dist

from benchmarks.harness import pin, table
from benchmarks.rivals.contest import Result, contest
from benchmarks.rivals.entrants import ENTRANTS, HEADER, OVER_A_LINK, figures_of, present, rows_of
from tests.support.hosts import finish, hosts, torchrun, why_not

RATES, DELAY = ("10gbit", "1gbit", "100mbit"), "0.2ms"
ROUNDS = {1: 2, 4: 1}  # by sequences


def measure(tokens: int, quick: bool) -> dict[str, float]:
    """Prints a table for each rate. Quick: one sequence, over 1 Gb/s."""
    if reason := why_not():
        print(f"No part over a link: {reason}\n")
        return {}
    figures: dict[str, float] = {}
    for rate in RATES[1:2] if quick else RATES:
        rows: list[list[object]] = []
        for sequences, results in between_hosts(rate, quick or rate == RATES[0], quick).items():
            rows += rows_of(results, sequences, tokens)
            figures |= figures_of(results, f"{sequences}_{rate}")
        table(f"Two hosts, {rate} and {DELAY} apart", HEADER, rows)
    return figures


def between_hosts(rate: str, single: bool, quick: bool) -> dict[int, dict[str, Result]]:
    """Results by the number of sequences; ``single``: of one alone."""
    with hosts(2, rate, DELAY) as two:
        options = ["--part", "link", *(["--quick"] if quick else []), *(["--single"] if single else [])]
        output = "".join(finish(torchrun(two, "-m", "benchmarks.rivals", *options), 900.0))
    found: dict[str, dict[str, Any]] = json.loads(output.strip().splitlines()[-1])
    return {int(n): {name: Result(**result) for name, result in results.items()} for n, results in found.items()}


def on_host(tokens: int, single: bool, quick: bool) -> NoReturn:
    """What the rank of each host runs; the first prints its results as one line."""
    pin(0)
    dist.init_process_group("gloo")
    results: dict[int, Mapping[str, Result]] = {}
    for sequences, names in OVER_A_LINK.items():
        if sequences == 1 or not single:
            entrants = {name: ENTRANTS[name] for name in present(names)}
            results[sequences] = contest(entrants, sequences, tokens, 1 if quick else ROUNDS[sequences])
    if dist.get_rank() == 0:
        print(json.dumps({n: {name: asdict(r) for name, r in mine.items()} for n, mine in results.items()}), flush=True)
    dist.barrier()
    os._exit(0)  # as in benchmarks.harness: gloo's threads may still hear of a rank that has left
