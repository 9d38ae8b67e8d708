"""What verbs share: options, their conversion to arguments of the library, and the console.

Knobs of the planner are declared once, as fields of ``PlanOptions`` and ``CostOptions`` (planning/options.py).
``add_knobs`` makes an option of each, ``request_of`` makes the arguments of ``terapipe.plan`` again::

    num_slices: int | None = knob("...", unit="N")   a field
    --num-slices N                                   add_request(parser), with its help
    parsed.num_slices                                argparse
    plan(..., num_slices=parsed.num_slices)          request_of(parsed)

So a new knob needs no line here. Refusals that depend on two options are here, because only the command line can tell
an option that was left out from one that has its default.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from terapipe import files
from terapipe.api import Costs
from terapipe.planning.hardware import DESCRIPTION, DEVICES, HOSTS, Cluster
from terapipe.planning.options import (
    COSTS,
    FIXED,
    MEMORY,
    CostOptions,
    PlanOptions,
    explain,
    kind_of,
    names_of,
)
from terapipe.planning.order import ORDERS, order_named
from terapipe.planning.presets import PRESETS
from terapipe.planning.profile import Profile
from terapipe.reporting.plans import WIDTH
from terapipe.reporting.svg import require_png
from terapipe.search.table import CostTable

# Options that name files. A file that is written must differ from all others of the same command.
OUTPUTS = ("save", "slurm", "kubernetes", "html", "svg", "png", "trace", "out")
INPUTS = ("profile", "cost_table", "plan", "measured")
MOST_SECONDS = 1e8  # of a timeout: what the clock of threads can count
NO_OPTION = ("devices",)  # the number of ranks is dp x pp x tp, or that of the profile

T = TypeVar("T")
Verbs = Any  # the type of argparse's subparsers is private

console = Console(highlight=False, soft_wrap=True)  # what all verbs print to
if not console.is_terminal:
    console.width = WIDTH


def check_outputs(parsed: argparse.Namespace) -> None:
    """Refuses outputs that cannot be written or would overwrite another file of the same command. Called before
    anything is computed: a plan that took minutes must not be lost to a folder's name.

    Args:
        parsed: Options of which some are in ``OUTPUTS`` and ``INPUTS``. A PNG also needs its extra.
    """
    taken: dict[Path, str] = {}
    for name in (*INPUTS, *OUTPUTS):
        path = getattr(parsed, name, None)
        if not isinstance(path, Path):
            continue
        if name in OUTPUTS:
            _check_file(path, name)
            if path.resolve() in taken:
                raise ValueError(f"--{name} and {taken[path.resolve()]} are the same file, {path}; name another")
        taken[path.resolve()] = name.replace("_", "-")
    if getattr(parsed, "png", None) is not None:
        require_png()


def _check_file(path: Path, name: str) -> None:
    """Refuses a folder, a device, and a path below a file. Missing folders are fine: they are made when writing."""
    files.check_kind(path)
    if path.is_dir():
        raise ValueError(f"--{name} names a file to write, {path} is a folder")
    parent = next(folder for folder in path.resolve().parents if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"--{name} {path} cannot be written: {parent} is a file, not a folder")


def add_source(
    parser: argparse.ArgumentParser, *, table: bool = False, required: bool = True, several: bool = False
) -> None:
    """Adds ``--model``, where costs come from, and the knobs of ``CostOptions``.

    Args:
        parser: Of a verb.
        table: Whether the verb can plan with a cost table.
        required: Whether one of the sources must be given. A saved plan has its own.
        several: Whether ``--cluster`` may be given several times; it is then a list.
    """
    sources = "a described cluster, a profile or a cost table" if table else "a described cluster or a profile"
    group = parser.add_argument_group("model and costs", f"Costs come from {sources}.")
    group.add_argument("--model", help=f"{model_help()}. Needed with --cluster; a profile knows its model")
    costs = group.add_mutually_exclusive_group(required=required)
    costs.add_argument(
        "--cluster",
        metavar="CLUSTER",
        action="append" if several else "store",
        help=("may be given several times, to set clusters side by side; " if several else "")
        + "a described cluster: HOST:COUNT, such as dgx-h100:8 for eight hosts, or "
        f"{DESCRIPTION}, such as l40s:8,pcie,25Gb:4. Costs are computed from data sheets. HOST is one of "
        f"{', '.join(HOSTS)}, cpu for this machine, or a file of `terapipe calibrate`; DEVICE is one of "
        f"{', '.join(DEVICES)}, or such a file; LINK is pcie, nvlink or a bandwidth such as 50GB; NETWORK is a host's, "
        "such as 25Gb or 8x400Gb",
    )
    costs.add_argument("--profile", metavar="FILE", type=Path, help="measurements of `terapipe profile`")
    if table:
        costs.add_argument(
            "--cost-table",
            metavar="FILE",
            type=Path,
            help="your own measurements: a JSON list of {size, length, context, seconds}, where seconds are forward "
            "plus backward of a slice on one stage",
        )
    add_knobs(parser, {COSTS: group}, CostOptions)


def model_help() -> str:
    """Makes the help of ``--model``: presets, shapes and Hugging Face models."""
    shape = "layers=96,hidden=12288,heads=96[,kv_heads=8,ffn=...,vocab=...]"
    return f"a preset ({', '.join(PRESETS)}), a shape ({shape}), or a Hugging Face model (its config.json or folder)"


def add_request(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the batch, and an option for every knob of ``PlanOptions``.

    Args:
        parser: Of a verb.
        required: Whether batch size and sequence length must be given. A saved plan has them.
    """
    batch = parser.add_argument_group(MEMORY)
    batch.add_argument(
        "--batch-size", type=int, required=required, metavar="N", help="sequences per step, over all replicas"
    )
    batch.add_argument("--seq-len", type=int, required=required, metavar="TOKENS", help="tokens per sequence")
    fixed = parser.add_argument_group(FIXED, "Chosen by the planner if left out.")
    add_knobs(parser, {MEMORY: batch, FIXED: fixed}, PlanOptions)


def add_knobs(parser: argparse.ArgumentParser, groups: dict[str, Any], kind: type) -> None:
    """Makes an option of every field of an options class: ``--name``, its type, and its help.

    Args:
        parser: Where to add them.
        groups: Groups that the parser has already, by title. Others are added.
        kind: The options class.
    """
    for entry in fields(kind):
        if entry.name in NO_OPTION:
            continue
        told, title, value = entry.metadata, entry.metadata["group"], kind_of(entry.type)
        groups[title] = groups.get(title) or parser.add_argument_group(title)
        said = told["unset"] == "any" or (value is bool and entry.default is not None)
        text = explain(entry) + ("" if said else f" (default: {told['unset']})")
        how: dict[str, Any] = {"type": PARSERS.get(value), "metavar": told["unit"]}
        if value is bool:
            how = {"action": "store_true" if entry.default is False else argparse.BooleanOptionalAction}
        groups[title].add_argument(f"--{entry.name.replace('_', '-')}", help=text.replace("%", "%%"), **how)


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Adds what the launch command of a plan, and the Slurm or Kubernetes job, depend on.

    Args:
        parser: Of a verb.
    """
    launch = parser.add_argument_group("launching", "The plan ends with the command that starts it.")
    launch.add_argument(
        "--script",
        help="what torchrun runs, such as train.py (default: `-m terapipe train run.toml` with this plan)",
    )
    launch.add_argument("--endpoint", metavar="HOST:PORT", help="rendezvous of several hosts: address of one of them")
    launch.add_argument("--name", help="name of the job (default: terapipe)")
    launch.add_argument("--slurm", metavar="FILE", type=Path, help="write a Slurm batch script")
    launch.add_argument("--kubernetes", metavar="FILE", type=Path, help="write a Kubernetes Service and Job")
    launch.add_argument("--image", help="container image of the Kubernetes Job")


def orders_help() -> str:
    """The orders with their titles, for the end of a help text."""
    titles = {order.name: order.title + ("" if order.sliced else ", whole sequences") for order in ORDERS.values()}
    return "orders:\n" + "\n".join(f"  {name:18s}  {title}" for name, title in titles.items())


@contextmanager
def progress_of(verb: str, *, shown: bool = True) -> Iterator[Callable[[float], None]]:
    """A bar on the terminal, gone in the end. Nothing if errors go elsewhere: a log file needs no bar.

    Args:
        verb: What is done, such as "planning", in front of the bar.
        shown: False on all ranks but one.

    Yields:
        A function to be called with the completed share, between 0 and 1.
    """
    columns = (TextColumn(verb), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, disable=not (shown and screen.is_terminal), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def costs_of(parsed: argparse.Namespace) -> Costs:
    """Reads the profile or the cost table, or makes the cluster, that the options name.

    Args:
        parsed: With the options of ``add_source``.
    """
    if parsed.profile is not None:
        refuse_with("--profile", parsed, "layers_only", "autocast")
        return load(parsed.profile, Profile.from_json)
    if getattr(parsed, "cost_table", None) is not None:
        return load(parsed.cost_table, CostTable.from_json)
    if parsed.cluster is None:
        raise ValueError("costs come from --cluster and --model, or from --profile; give one of them")
    if parsed.model is None:
        raise ValueError(
            "--cluster needs --model: a preset, a shape such as layers=96,hidden=12288,heads=96, or a folder"
        )
    return Cluster(parsed.cluster)


def request_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """The options that ``terapipe.plan`` takes, by its argument names.

    Args:
        parsed: With the options of ``add_source`` and ``add_request``.
    """
    if parsed.batch_size is None or parsed.seq_len is None:
        raise ValueError("give --batch-size and --seq-len")
    _refuse_conflicts(parsed)
    names = {"batch_size", "seq_len", *names_of(PlanOptions), *names_of(CostOptions)} - set(NO_OPTION)
    return {name: getattr(parsed, name) for name in names}


def _refuse_conflicts(parsed: argparse.Namespace) -> None:
    """Refuses options that have no effect together with others: whoever gives both expects something that will not
    be."""
    if parsed.num_slices is not None:
        refuse_with("--num-slices", parsed, "slice_lengths", "tile", "distinct")
    if parsed.slice_lengths is not None:
        refuse_with("--slice-lengths", parsed, "tile", "distinct")
    if parsed.order is not None and not order_named(parsed.order).sliced:
        refuse_with(f"--order {parsed.order}, which takes whole sequences", parsed, "tile", "distinct")
    if parsed.dp == 1:
        refuse_with("--dp 1", parsed, "shard")
    if parsed.offload == "none":
        refuse_with("--offload none", parsed, "offload_kv", "host_memory")


def refuse_with(chosen: str, parsed: argparse.Namespace, *names: str) -> None:
    """Refuses options if they were given, because they have no effect with another: "--tile would have no effect with
    --num-slices; leave out one or the other".

    Args:
        chosen: What takes their effect away, for the message.
        parsed: All options.
        *names: Of the options, as attributes of ``parsed``.
    """
    options = {f"--{name.replace('_', '-')}": getattr(parsed, name, None) for name in names}
    asked = [option for option, value in options.items() if value is not None and value is not False]
    if asked:
        raise ValueError(f"{' and '.join(asked)} would have no effect with {chosen}; leave out one or the other")


def _whole_number(text: str) -> int:
    """Parses a number for an option, and names the option for lists if it was a list."""
    try:
        return int(text)
    except ValueError:
        remedy = "; lengths are given by --slice-lengths" if "," in text else ""
        raise argparse.ArgumentTypeError(f"it must be one whole number, got {text!r}{remedy}") from None


def _lengths(text: str) -> tuple[int, ...]:
    """Parses lengths of slices: "704,688,656"."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"lengths are whole numbers such as 704,688,656, got {text!r}") from None


PARSERS: dict[type, Callable[[str], Any]] = {int: _whole_number, str: str, tuple: _lengths}


def load(path: Path, parse: Callable[[str], T]) -> T:
    """Reads and parses a file. Errors name the file.

    Args:
        path: Of a text file.
        parse: Makes an object of the text, such as ``Profile.from_json``, and raises ValueError where it cannot.
    """
    text = files.read(path)
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
