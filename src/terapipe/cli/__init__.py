"""The command line: ``terapipe VERB ...``, or ``python -m terapipe VERB ...``.

Each verb is a module with two functions: ``add`` declares its options, ``run`` calls the library and prints the result.
A verb computes nothing that Python cannot have: its docstring names the function that does the same. ::

    before training     doctor     can this machine, or can all hosts together, train?
                        verify     is this Hugging Face model exact in slices?      models   which ones are?
                        profile    how long do slices take here?                    calibrate  and on more such devices?
                        plan       how should model and batch be cut?               compare  and by other orders?
                        simulate   what does a step of that plan look like?
    training            train      by a run.toml, with checkpoints and a report
    the paper           reproduce  its experiments, simulated

Results go to stdout, progress and errors to stderr, so ``--json`` can be piped. Exit codes: 0 all is well, 1 the answer
is no (a problem, an inexact model, a run that failed), 2 the question was wrong, 130 after Ctrl-C.

Modules of verbs do not import torch at their top: ``terapipe plan`` answers in the time that torch takes to load.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

import terapipe
from terapipe.cli import calibrate, compare, doctor, models, plan, profile, reproduce, simulate, train, verify

VERBS = (doctor, train, profile, calibrate, plan, compare, simulate, reproduce, verify, models)


class _Parser(argparse.ArgumentParser):
    """Prints errors as one line, like all other messages, without the usage of every option.

    Options must be written out: an abbreviation that is clear today would be ambiguous with the next knob.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Ends with exit code 2 and one line. For an unknown verb it names all verbs and the one that was likely meant.

        Args:
            message: What argparse says.
        """
        wrong = re.fullmatch(r"argument VERB: invalid choice: '(.*)' \(choose from .*\)", message, re.DOTALL)
        message = f"{_unknown_verb(wrong[1])} See" if wrong else f"{message}; see"
        self.exit(2, f"{self.prog}: {message} {self.prog} --help\n")


def _unknown_verb(word: str) -> str:
    """Says which verbs there are, and which one was likely meant by a word that is none."""
    names = [verb.__name__.rpartition(".")[2] for verb in VERBS]
    likely = get_close_matches(word, names, 1)
    hint = f"; did you mean {likely[0]!r}?" if likely else "."
    return f"the verb must be one of {', '.join(names)}, got {word!r}{hint}"


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs. Without a verb it prints its help and succeeds, because that is what was asked for."""
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
    """Runs one command. Bad input (``ValueError``, ``OSError``) gives one message and exit code 2; a traceback is for
    faults of the program.

    Args:
        arguments: Without the program's name; by default those of this process.

    Returns:
        The exit code.
    """
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
