"""``terapipe models``: lists which Hugging Face models are exact, and why others are refused.

    $ terapipe models
    model                              by         largest error  packed documents  router loss  why not, or what to mind
    afmoe                     exact    attention  1e-07          exact
    apertus                   exact    attention  3e-16          exact
    ...
    137 of 183 types are exact with transformers 5.22.2, 98 of them with packed documents, 24 with ...

The list is a file of this release (hf/models.json), written by `terapipe verify --all --json`, so the answer comes at
once and without transformers. If another transformers is installed, the last line says how to ask it.
"""

import argparse
import json
from importlib import metadata, resources

from rich.table import Table

from terapipe.cli.options import Verbs, console


def add(verbs: Verbs) -> None:
    """Declares the options of ``terapipe models``."""
    parser = verbs.add_parser(
        "models",
        help="list the Hugging Face models that are exact, and why others are refused",
        description="Lists the results of `terapipe verify --all` with the version of transformers that this release "
        "was tested with.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Prints the list as a table, or with ``--json`` the file itself.

    Args:
        parsed: Whether to print JSON.
    """
    text = resources.files("terapipe.hf").joinpath("models.json").read_text("utf-8")
    if parsed.json:
        print(text)
        return 0
    verified = json.loads(text)
    columns = ("model", "", "by", "largest error", "packed documents", "router loss", "why not, or what to mind")
    table = Table(*columns, box=None, pad_edge=False)
    for row in verified["models"]:
        mind = f"slices of at least {row['min_slice']} tokens" if row["min_slice"] > 1 else ""
        error = f"{row['worst']:.0e}" if row["exact"] else ""
        packed = ("exact" if row["documents_exact"] else "refused") if row["exact"] else ""
        state = "exact" if row["exact"] else "refused"
        routers = "exact" if row["router_exact"] else "refused" if row["router_reason"] else ""
        table.add_row(row["model"], state, row["backend"] or "", error, packed, routers, row["reason"] or mind)
    console.print(table)
    exact = sum(row["exact"] for row in verified["models"])
    console.print(
        f"\n{exact} of {len(verified['models'])} types are exact with transformers {verified['transformers']}, "
        f"{sum(row['documents_exact'] for row in verified['models'])} of them with packed documents, "
        f"{sum(row['router_exact'] for row in verified['models'])} with a load-balancing loss of routers."
    )
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        installed = "none"
    if installed != verified["transformers"]:
        console.print(f"Installed here: {installed}. `terapipe verify --all` checks it, in a few minutes.")
    return 0
