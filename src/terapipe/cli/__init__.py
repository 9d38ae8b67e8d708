"""The command line: one module per verb, which parses, calls, prints."""

import argparse
import sys
from collections.abc import Sequence

import terapipe
from terapipe.cli import compare, doctor, models, plan, profile, reproduce, simulate, train, verify

VERBS = (doctor, train, profile, plan, compare, simulate, reproduce, verify, models)


def main(arguments: Sequence[str] | None = None) -> int:
    """What ``terapipe`` runs. Bad input is one message and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="terapipe", description="Token-level pipeline parallelism: measure, plan, train, compare, simulate."
    )
    parser.add_argument("--version", action="version", version=f"terapipe {terapipe.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add(verbs)
    parsed = parser.parse_args(arguments)
    try:
        run: int = parsed.run(parsed)
    except (ValueError, OSError) as error:
        print(f"terapipe {parsed.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return run
