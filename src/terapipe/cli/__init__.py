"""The command line: one module per verb, which parses, calls, prints."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import terapipe
from terapipe.cli import compare, doctor, models, plan, profile, reproduce, simulate, train, verify

VERBS = (doctor, train, profile, plan, compare, simulate, reproduce, verify, models)


class _Parser(argparse.ArgumentParser):
    """One line, as all other messages are, instead of the usage of every option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="terapipe", description="Token-level pipeline parallelism: measure, plan, train, compare, simulate."
    )
    made.add_argument("--version", action="version", version=f"terapipe {terapipe.__version__}")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add(verbs)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """What ``terapipe`` runs. Bad input is one message and exit code 2."""
    try:
        parsed = parser().parse_args(arguments)
    except SystemExit as end:  # of argparse: 0 after --help, 2 after its message
        return int(end.code or 0)
    try:
        run: int = parsed.run(parsed)
    except (ValueError, OSError) as error:
        print(f"terapipe {parsed.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return run


def entry() -> NoReturn:
    """The command. Leaves without running destructors: those of torch's threads abort a process now and then."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
