"""The command line. Each verb is a module that parses arguments, calls the library and prints the result."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

import terapipe
from terapipe.cli import compare, doctor, models, plan, profile, reproduce, simulate, train, verify

VERBS = (doctor, train, profile, plan, compare, simulate, reproduce, verify, models)


class _Parser(argparse.ArgumentParser):
    """Prints errors as one line, like all other messages, without the usage of every option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"argument VERB: invalid choice: '(.*)' \(choose from .*\)", message, re.DOTALL)
        message = f"{_unknown_verb(wrong[1])} See" if wrong else f"{message}; see"
        self.exit(2, f"{self.prog}: {message} {self.prog} --help\n")


def _unknown_verb(word: str) -> str:
    names = [verb.__name__.rpartition(".")[2] for verb in VERBS]
    likely = get_close_matches(word, names, 1)
    hint = f"; did you mean {likely[0]!r}?" if likely else "."
    return f"the verb must be one of {', '.join(names)}, got {word!r}{hint}"


def parser() -> argparse.ArgumentParser:
    root = _Parser(
        prog="terapipe",
        description="Token-level pipeline parallelism for PyTorch. `terapipe VERB --help` explains a verb.",
    )
    root.add_argument("--version", action="version", version=f"terapipe {terapipe.__version__}")
    verbs = root.add_subparsers(dest="verb", metavar="VERB")
    for verb in VERBS:
        verb.add(verbs)

    def help_alone(parsed: argparse.Namespace) -> int:
        root.print_help()
        return 0

    root.set_defaults(run=help_alone)  # of a verb, its own
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point of ``terapipe``. Bad input gives one message and exit code 2."""
    try:
        parsed = parser().parse_args(arguments)
    except SystemExit as end:  # from argparse: 0 after --help, 2 after an error
        return int(end.code or 0)
    try:
        code: int = parsed.run(parsed)
    except (ValueError, OSError) as error:
        print(f"terapipe {parsed.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def entry() -> NoReturn:
    """The console script. Exits without running destructors, because those of torch's threads can abort the process."""
    code = main()
    try:
        sys.stdout.flush()
    except OSError as error:  # a full disk, or a reader that has gone
        print(f"terapipe: what was printed could not be written: {error}", file=sys.stderr)
        code = code or 1
    sys.stderr.flush()
    os._exit(code)
