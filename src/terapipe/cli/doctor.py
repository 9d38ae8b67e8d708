"""``terapipe doctor``: checks that this machine, or all hosts together, can train."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from rich.markup import escape

from terapipe.cli.options import Verbs, console
from terapipe.doctor.diagnosis import Finding, Status, diagnose, worst
from terapipe.doctor.facts import Examination
from terapipe.reporting.units import count

_COLORS = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "red"}


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "doctor",
        help="check that this machine, or all hosts together, can train",
        description="Looks for problems that would keep ranks from training or slow them down, and says how to fix "
        "them. Starts ranks on this machine, or, under torchrun, checks all hosts together. Exit code 1 if there is a "
        "problem.",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="processes to start, without torchrun (default: 2)"
    )
    parser.add_argument(
        "--port", type=int, default=29500, help="port that training will use; checks that it is free (default: 29500)"
    )
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="SECONDS", help="how long to wait for all ranks (default: 30)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    if parsed.ranks < 1 or not 0 < parsed.timeout < inf:
        raise ValueError(f"--ranks and --timeout must be positive, got {parsed.ranks} and {parsed.timeout}")
    if not 0 < parsed.port < 2**16:
        raise ValueError(f"--port must be between 1 and 65535, got {parsed.port}")
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries is missing
        remedy = "install it anew: pip install --force-reinstall torch"
        return _report([Finding("versions", Status.PROBLEM, f"torch does not load: {error}", remedy)], {}, parsed.json)
    from terapipe.doctor.examine import alone, examine
    from terapipe.runtime.environment import under_torchrun

    examined = examine(parsed.timeout) if under_torchrun() else alone(parsed.ranks, parsed.port, parsed.timeout)
    if examined is None:  # only the first rank reports
        return 0
    return _report(diagnose(Examination.from_dict(examined)), examined, parsed.json)


def _report(findings: Sequence[Finding], examined: dict[str, Any], as_json: bool) -> int:
    status = worst(findings)
    if as_json:
        print(json.dumps({"status": status, "findings": [asdict(f) for f in findings], "examined": examined}))
    else:
        _print(findings)
    return int(status is Status.PROBLEM)


def _print(findings: Sequence[Finding]) -> None:
    indent = " " * 26
    for f in findings:
        console.print(f"[{_COLORS[f.status]}]{f.status:8s}[/] {f.check:16s} {escape(f.found)}")
        for line in f.details:
            console.print(f"{indent}{escape(line)}", style="dim")
        if f.remedy:
            console.print(f"{indent}-> {escape(f.remedy)}")
    problems, warnings = (sum(f.status is s for f in findings) for s in (Status.PROBLEM, Status.WARNING))
    console.print(f"\n{count(problems, 'problem')}, {count(warnings, 'warning')}")
