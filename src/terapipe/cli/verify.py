"""``terapipe verify``: tests on a small copy whether a sliced Hugging Face model has exact gradients."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from math import isnan
from typing import TYPE_CHECKING

from rich.table import Table

from terapipe.cli.options import Verbs, console
from terapipe.extras import install_line
from terapipe.planning.limits import LARGEST

if TYPE_CHECKING:
    from terapipe.hf.verify.verification import VerifyResult


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "verify",
        help="test that a sliced Hugging Face model has exact gradients",
        description="Cuts a small copy of the model with random weights into stages and uneven slices, and compares "
        "loss and every gradient with the unmodified model, then again with packed documents, and for a mixture of "
        "experts with transformers' load-balancing loss. Exit code 1 if they differ, 2 if the model is not supported.",
    )
    parser.add_argument("model", nargs="?", help="a model type such as llama, a config.json, or a model's folder")
    parser.add_argument("--all", action="store_true", help="test all causal-LM types of the installed transformers")
    parser.add_argument("--stages", type=int, default=2, metavar="N", help="number of stages (default: 2)")
    parser.add_argument(
        "--num-slices",
        type=int,
        default=4,
        metavar="N",
        help="number of slices of each sequence of 29 tokens (default: 4)",
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="also test tensor parallelism over N processes, with the model's own tp_plan (default: 1)",
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where to run the copies (default: cpu)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    if parsed.tp > 1 and parsed.device != "cpu":
        raise ValueError("--tp is tested on CPUs only; leave out --device, or --tp")
    if bool(parsed.model) == parsed.all:
        raise ValueError("give one model, or --all")
    if not 1 <= parsed.stages <= LARGEST["layers"]:
        raise ValueError(f"--stages must be at least 1 and at most {LARGEST['layers']}, got {parsed.stages}")
    if parsed.tp < 1:
        raise ValueError(f"--tp must be at least 1, got {parsed.tp}")
    _load_transformers()
    _refuse_without_gpu(parsed.device)
    from terapipe.cli.verify_types import verify_model
    from terapipe.hf.verify.reference import uneven_lengths

    uneven_lengths(parsed.num_slices, 1)  # raises ValueError for an impossible number before anything is built
    if parsed.all:
        return _all(parsed)
    result = verify_model(parsed.model, parsed.stages, parsed.num_slices, parsed.tp, parsed.device)
    if parsed.json:
        print(json.dumps(result.to_dict()))
    else:
        _print(result, parsed)
    return 0 if result.exact else 2 if isnan(result.worst) else 1


def _load_transformers() -> None:
    """Without its warnings. Raises ValueError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ValueError(f"this needs transformers; {install_line('hf')}") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _refuse_without_gpu(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, and torch sees none here")


def _all(parsed: argparse.Namespace) -> int:
    """Tests all model types. Exit code 1 if a result could not be confirmed with another copy."""
    from importlib import metadata

    from terapipe.cli.verify_types import count, count_uses, verify_all
    from terapipe.hf.verify.verification import BOUND

    results, wrong, with_dropout = [], Counter[str](), 0
    confirms = parsed.tp == 1 and parsed.device == "cpu"
    for result, errors in verify_all(parsed.stages, parsed.num_slices, parsed.tp, parsed.device):
        results.append(result)
        wrong_uses = [use for use, error in errors.items() if not error <= (0 if use == "dropout" else BOUND)]
        wrong.update(wrong_uses)
        with_dropout += "dropout" in errors
        if not parsed.json:
            console.print(_line(result) + "".join(f", WRONG: {use}" for use in wrong_uses), markup=False)
    counts = count_uses(results, with_dropout, wrong) if confirms else count(results)
    if parsed.json:
        rows = [{key: value for key, value in r.to_dict().items() if key != "groups"} for r in results]
        print(json.dumps({"transformers": metadata.version("transformers"), **counts, "models": rows}))
    else:
        backends = f"{counts['attention']} by the attention backend, {counts['cache']} by the cache backend"
        console.print(f"\n{_sum_up('whole sequences', counts['whole'])} ({backends})")
        for use, title in USES.items():
            if use in counts:
                console.print(_sum_up(title, counts[use]))
    return 1 if wrong else 0


USES = {"documents": "packed documents", "dropout": "recomputation with dropout", "routers": "losses of routers"}


def _sum_up(use: str, counts: Mapping[str, int]) -> str:
    return f"{use}: " + ", ".join(f"{number} {what}" for what, number in counts.items())


def _line(result: "VerifyResult") -> str:
    if not result.exact:
        return f"{result.model:24s} refused  {result.reason}"
    note = f", slices of at least {result.min_slice} tokens" if result.min_slice > 1 else ""
    documents = "" if result.documents_exact else f"; packed documents refused: {result.documents_reason}"
    routers = ""
    if result.has_router_loss:
        routers = f"; router loss exact ({result.router:.1e})" if result.router_exact else "; router loss refused: "
        routers += result.router_reason
    return (
        f"{result.model:24s} exact    {result.backend} backend, largest error {result.worst:.1e}{note}"
        f"{routers}{documents}"
    )


def _print(result: "VerifyResult", parsed: argparse.Namespace) -> None:
    console.print(_line(result), markup=False)
    if result.exact:
        table = Table("parameters", "largest relative error", box=None, pad_edge=False)
        for group, error in result.groups:
            table.add_row(group, f"{error:.1e}")
        tp = f", with tensor parallel {parsed.tp}" if parsed.tp > 1 else ""
        console.print(
            f"\nA small copy in {parsed.stages} stages and {parsed.num_slices} slices{tp}, against the whole model:"
        )
        console.print(table)
