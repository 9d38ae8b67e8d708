"""Options that several verbs share, and what becomes of them."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from terapipe.api import Costs
from terapipe.planning.hardware import HOSTS, Cluster
from terapipe.planning.order import ORDERS, order_named
from terapipe.planning.profile import Profile
from terapipe.presets import PRESETS
from terapipe.search.table import CostTable

T = TypeVar("T")

Verbs = Any  # argparse does not name the type of its subparsers


def add_source(parser: argparse.ArgumentParser, *, table: bool = False, required: bool = True) -> None:
    shape = "layers=96,hidden=12288,heads=96[,kv_heads=8,ffn=...,vocab=...]"
    parser.add_argument(
        "--model",
        help=f"a preset ({', '.join(PRESETS)}), a shape ({shape}), or a Hugging Face model: its config.json or folder",
    )
    costs = parser.add_mutually_exclusive_group(required=required)
    costs.add_argument("--cluster", metavar="HOST:COUNT", help=f"hosts: {', '.join([*HOSTS, 'cpu'])} (cpu: this one)")
    costs.add_argument("--profile", metavar="FILE", type=Path, help="what `terapipe profile` measured")
    if table:
        costs.add_argument(
            "--cost-table",
            metavar="FILE",
            type=Path,
            help="a JSON list of {size, length, context, seconds}: forward plus backward on one of equal stages",
        )
    parser.add_argument(
        "--layers-only", action="store_true", help="leave out embedding, head and loss, as the TeraPipe paper does"
    )


def add_request(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument("--batch-size", type=int, required=required, help="sequences per step, over all replicas")
    parser.add_argument("--seq-len", type=int, required=required, metavar="TOKENS", help="tokens per sequence")
    parser.add_argument("--memory", metavar="BYTES", help="budget per device, such as 16GiB; default: what it has")
    fixed = parser.add_argument_group("fixed by you, chosen if left out")
    fixed.add_argument("--dp", type=int, help="data parallel replicas")
    fixed.add_argument("--pp", type=int, help="pipeline ranks")
    fixed.add_argument("--tp", type=int, help="tensor parallel ranks")
    fixed.add_argument("--order", help=f"one of {', '.join(ORDERS)}")
    fixed.add_argument("--num-slices", type=_count, metavar="COUNT", help="how many equal slices of each sequence")
    fixed.add_argument("--slice-lengths", type=_lengths, metavar="TOKENS,...", help="such as 704,688,656")
    fixed.add_argument("--microbatch-size", type=int, help="sequences per microbatch")
    fixed.add_argument("--chunks", type=int, help="chunks of layers per rank")
    fixed.add_argument("--recompute", choices=("on", "off"), help="keep only a slice's input for its backward")
    fixed.add_argument("--shard", action="store_true", help="shard model state over replicas (FSDP2)")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--tile", type=int, help="slice lengths are multiples of it (default: 8; 128 on A100 and later)"
    )
    limits.add_argument("--distinct", type=int, help="at most so many different slice lengths")


def add_launch(parser: argparse.ArgumentParser) -> None:
    launch = parser.add_argument_group("how to start it")
    launch.add_argument(
        "--script", help="what torchrun starts, such as train.py (default: -m terapipe train run.toml with this plan)"
    )
    launch.add_argument("--endpoint", metavar="HOST:PORT", help="where several hosts meet: one of them")
    launch.add_argument("--name", help="of the job (default terapipe)")
    launch.add_argument("--slurm", metavar="FILE", type=Path, help="write a batch script for sbatch")
    launch.add_argument("--kubernetes", metavar="FILE", type=Path, help="write a Service and a Job for kubectl")
    launch.add_argument("--image", help="what the Kubernetes job's containers are made of")


def costs_of(parsed: argparse.Namespace) -> Costs:
    """What was measured, or the cluster that was named."""
    if parsed.profile is not None:
        refuse_with("--profile", parsed, "layers_only")
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


COMMON = ("batch_size", "seq_len", "memory", "dp", "pp", "tp", "shard", "microbatch_size", "tile", "layers_only")
CUTS = ("order", "num_slices", "slice_lengths", "chunks", "distinct")


def request_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """The options that ``terapipe.plan`` takes, by its argument names."""
    if parsed.batch_size is None or parsed.seq_len is None:
        raise ValueError("give --batch-size and --seq-len")
    _refuse_conflicts(parsed)
    given = {name: getattr(parsed, name) for name in (*COMMON, *CUTS)}
    return {**given, "recompute": {"on": True, "off": False, None: None}[parsed.recompute]}


def _refuse_conflicts(parsed: argparse.Namespace) -> None:
    """Options that would have no effect beside others."""
    if parsed.num_slices is not None:
        refuse_with("--num-slices", parsed, "slice_lengths", "tile", "distinct")
    if parsed.slice_lengths is not None:
        refuse_with("--slice-lengths", parsed, "tile", "distinct")
    if parsed.order is not None and not order_named(parsed.order).sliced:
        refuse_with(f"--order {parsed.order}, which takes whole sequences", parsed, "tile", "distinct")
    if parsed.dp == 1:
        refuse_with("--dp 1", parsed, "shard")


def refuse_with(chosen: str, parsed: argparse.Namespace, *names: str) -> None:
    """An option that has no effect beside another is refused, never ignored."""
    found = {f"--{name.replace('_', '-')}": getattr(parsed, name, None) for name in names}
    given = [option for option, value in found.items() if value is not None and value is not False]
    if given:
        raise ValueError(f"{' and '.join(given)} would have no effect with {chosen}; leave out one or the other")


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        remedy = "; lengths are given by --slice-lengths" if "," in text else ""
        raise argparse.ArgumentTypeError(f"a number of slices is one whole number, got {text!r}{remedy}") from None


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"lengths are whole numbers such as 704,688,656, got {text!r}") from None


def load(path: Path, parse: Callable[[str], T]) -> T:
    """What a file holds; a refusal names the file."""
    try:
        return parse(read(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("this is not a text file") from None
