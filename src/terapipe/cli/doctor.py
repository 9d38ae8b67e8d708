"""``terapipe doctor``: checks that this machine, or all hosts together, can train.

    $ terapipe doctor                                                    two ranks on this machine
    ok       versions         python 3.11.7, torch 2.13.0+cpu, numpy 2.4.6, terapipe 0.1.0
    ok       rendezvous       2 ranks on 1 host met at 127.0.0.1:35889, and an all-reduce works
    ok       links in a host  latency up to 90.9 µs, at least 862 MiB/s
    warning  load             5.86 in the last minute, on 2 cores
                              -> something else is running; measurements, here or by `terapipe profile`, will be off
    ...
    0 problems, 1 warning

    $ torchrun --nnodes 2 --nproc-per-node 8 ... -m terapipe doctor      all hosts together; rank 0 reports

    $ terapipe doctor --prove                                            runs the software, writes terapipe-proof.json
    orders        holds     9 orders on 2 ranks, largest relative error of a gradient 4.5e-07     17.1
    killed rank   holds     1 of 1 survivors ended with a message, the last after 0.3 s: ...       3.8
    prediction    measured  a step took 0.072 s, 2.93 of the prediction                           14.3

Ranks gather facts (doctor/examination.py), which are judged without torch (doctor/diagnosis.py). Checks of ``--prove``
are in doctor/exactness.py and doctor/measurements.py. Exit code 1 if there is a problem, or if a check fails; warnings
and figures are 0.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from terapipe import files
from terapipe.cli.options import MOST_SECONDS, Verbs, check_outputs, console, refuse_with
from terapipe.doctor.diagnosis import Finding, Status, diagnose, worst
from terapipe.reporting.style import count

_COLORS = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "red"}


def add(verbs: Verbs) -> None:
    """Declares the options of ``terapipe doctor``; those of a proof are a group of their own.

    Args:
        verbs: The subparsers of the command line.
    """
    parser = verbs.add_parser(
        "doctor",
        help="check that this machine, or all hosts together, can train",
        description="Looks for problems that would keep ranks from training or slow them down, and says how to fix "
        "them. Starts ranks on this machine, or, under torchrun, checks all hosts together. Exit code 1 if there is a "
        "problem.",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes to start, without torchrun (default: 2; with --prove one for each GPU, at most 8)",
    )
    parser.add_argument(
        "--port", type=int, default=29500, help="port that training will use; checks that it is free (default: 29500)"
    )
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="SECONDS", help="how long to wait for all ranks (default: 30)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    prove = parser.add_argument_group("proof", "Runs the software on this hardware, and writes what it did to a file.")
    prove.add_argument(
        "--prove",
        action="store_true",
        help="run kernels, products, steps of all orders, of a Hugging Face model and under autocast, checkpoints, a "
        "killed rank, and measure memory, host time, prediction, transfers and links (15 minutes)",
    )
    prove.add_argument(
        "--size", choices=("small", "large"), help="of the models that are run (default: large on fast GPUs)"
    )
    prove.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write the proof (default: terapipe-proof.json)"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Examines or proves, and prints findings, or with ``--json`` one object: ``status``, ``findings`` (``check``,
    ``status``, ``found``, ``remedy``, ``details``) and ``examined``, the facts behind them. If torch does not load,
    that is the one finding: whoever runs the doctor may have nothing else to find out why.

    Args:
        parsed: The options.

    Returns:
        1 if there is a problem or a check fails; 0 on ranks that do not report.
    """
    if (parsed.ranks is not None and parsed.ranks < 1) or not 0 < parsed.timeout < MOST_SECONDS:
        raise ValueError(f"--ranks and --timeout must be positive, got {parsed.ranks} and {parsed.timeout}")
    if not parsed.prove:
        refuse_with("doctor without --prove", parsed, "size", "out")
    check_outputs(parsed)
    if not 0 < parsed.port < 2**16:
        raise ValueError(f"--port must be between 1 and 65535, got {parsed.port}")
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries is missing
        remedy = "install it anew: pip install --force-reinstall torch"
        return _report([Finding("versions", Status.PROBLEM, f"torch does not load: {error}", remedy)], {}, parsed.json)
    from terapipe.doctor.examination import alone, examine
    from terapipe.runtime.comm.environment import under_torchrun

    if parsed.prove:
        return _prove(parsed, under_torchrun())
    examined = examine(parsed.timeout) if under_torchrun() else alone(parsed.ranks or 2, parsed.port, parsed.timeout)
    if examined is None:  # only the first rank reports
        return 0
    return _report(diagnose(examined), asdict(examined), parsed.json)


def _prove(parsed: argparse.Namespace, started_by_torchrun: bool) -> int:
    """Runs all checks, writes the file, and prints a table. torchrun is refused: each check starts its own ranks."""
    if started_by_torchrun:
        raise ValueError("--prove starts its ranks itself; run it without torchrun, on one host")
    from terapipe.doctor import exactness, measurements
    from terapipe.doctor.proof import prove, ranks_here, sizes

    out = parsed.out or Path("terapipe-proof.json")
    ranks = parsed.ranks or ranks_here()
    say = (lambda name: None) if parsed.json else (lambda name: console.print(f"[dim]{name} ...[/]"))
    proof = prove({**exactness.CHECKS, **measurements.CHECKS}, ranks, sizes(parsed.size), say)
    files.write(out, json.dumps(proof, indent=1) + "\n")
    if parsed.json:
        print(json.dumps(proof))
    else:
        _print_proof(proof, out)
    return int(not proof["holds"])


def _print_proof(proof: dict[str, Any], out: Path) -> None:
    """Prints a line per check. A figure neither holds nor fails; it was measured."""
    table = Table("proof", "", "", "seconds", box=None, pad_edge=False)
    for row in proof["proofs"]:
        mark = {True: "[green]holds[/]", False: "[red]FAILS[/]", None: "[dim]measured[/]"}[row["holds"]]
        table.add_row(row["name"], mark, escape(row["says"]), f"{row['seconds']:.1f}")
    console.print()
    console.print(table)
    gpus = proof["machine"]["gpus"]
    console.print(f"\n{proof['ranks']} ranks on {', '.join(gpus) or 'CPUs'}; attach {out} to a report", markup=False)


def _report(findings: Sequence[Finding], examined: dict[str, Any], as_json: bool) -> int:
    """Prints findings as text or JSON and returns the exit code.

    Args:
        findings: In the order of the report.
        examined: The facts, for JSON.
        as_json: Whether to print JSON.
    """
    status = worst(findings)
    if as_json:
        print(json.dumps({"status": status, "findings": [f.to_dict() for f in findings], "examined": examined}))
    else:
        _print(findings)
    return int(status is Status.PROBLEM)


def _print(findings: Sequence[Finding]) -> None:
    """Prints a line per finding, its details dim below it, and what to do behind an arrow."""
    indent = " " * 26
    for f in findings:
        console.print(f"[{_COLORS[f.status]}]{f.status:8s}[/] {f.check:16s} {escape(f.message)}")
        for line in f.details:
            console.print(f"{indent}{escape(line)}", style="dim")
        if f.remedy:
            console.print(f"{indent}-> {escape(f.remedy)}")
    problems, warnings = (sum(f.status is s for f in findings) for s in (Status.PROBLEM, Status.WARNING))
    console.print(f"\n{count(problems, 'problem')}, {count(warnings, 'warning')}")
