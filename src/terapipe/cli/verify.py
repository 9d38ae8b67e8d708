"""``terapipe verify``: whether a Hugging Face model is exact when it is cut, proved on a small copy."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from terapipe.cli import show
from terapipe.cli.options import Verbs

if TYPE_CHECKING:
    from terapipe.modeling.hf.check import Verdict


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "verify",
        help="prove that a Hugging Face model is exact when it is cut",
        description="Cuts a small random copy of the model into stages and uneven slices, and compares loss and every "
        "gradient with the model in one piece. Exit code 1 if they differ, 2 if the model cannot be cut.",
    )
    parser.add_argument("model", nargs="?", help="a model type such as llama, a config.json, or a model's folder")
    parser.add_argument("--all", action="store_true", help="every causal-LM type of the installed transformers")
    parser.add_argument("--stages", type=int, default=2, help="stages (default 2)")
    parser.add_argument("--slices", type=int, default=4, help="slices of 29 tokens (default 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    if bool(parsed.model) == parsed.all:
        raise ValueError("give one model, or --all")
    if parsed.stages < 1:
        raise ValueError(f"--stages must be at least 1, got {parsed.stages}")
    load()
    from terapipe.modeling.hf.check import check, lengths

    lengths(parsed.slices, 1)  # refuses before anything is built
    if parsed.all:
        return _all(parsed)
    verdict = check(parsed.model, config_of(parsed.model), stages=parsed.stages, slices=parsed.slices)
    if parsed.json:
        print(json.dumps(verdict.to_dict()))
    else:
        _print(verdict, parsed)
    return 0 if verdict.exact else 2 if verdict.worst != verdict.worst else 1


def load() -> None:
    """Refuses in words where transformers is missing; otherwise quiet about what it misses."""
    try:
        import transformers
    except ImportError:
        raise ValueError("this needs transformers: pip install 'terapipe[hf]'") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def config_of(model: str) -> Any:
    """From a folder, a file, or a type's defaults."""
    from transformers import AutoConfig

    from terapipe.modeling.hf.shrink import causal_lm_types, small_config

    path = Path(model)
    if path.exists():
        try:
            return AutoConfig.from_pretrained(path)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:  # JSON, but of another kind
            raise ValueError(f"{path} holds no Hugging Face configuration: {error}") from None
    if model not in causal_lm_types():
        raise ValueError(f"{model!r} is no file or folder here, and no causal-LM type of the installed transformers")
    return small_config(model)


def sweep(stages: int = 2, slices: int = 4) -> Iterator["Verdict"]:
    from terapipe.modeling.hf.check import Verdict, check
    from terapipe.modeling.hf.shrink import causal_lm_types, small_config

    for name in causal_lm_types():
        try:
            config = small_config(name)
        except Exception as error:  # a type whose own defaults are invalid
            yield Verdict(name, reason=str(error).strip().replace("\n", " "))
            continue
        yield check(name, config, stages=stages, slices=slices)


def _all(parsed: argparse.Namespace) -> int:
    verdicts = []
    for verdict in sweep(parsed.stages, parsed.slices):
        verdicts.append(verdict)
        if not parsed.json:
            show.console.print(_line(verdict), markup=False)
    fast, general = (sum(v.exact and v.seam == seam for v in verdicts) for seam in ("fast", "general"))
    if parsed.json:
        print(json.dumps({"fast": fast, "general": general, "models": [v.to_dict() for v in verdicts]}))
    else:
        refused = len(verdicts) - fast - general
        show.console.print(
            f"\n{fast + general} exact: {fast} by the fast seam, {general} by the general; {refused} refused"
        )
    return 0


def _line(verdict: "Verdict") -> str:
    if not verdict.exact:
        return f"{verdict.model:24s} refused  {verdict.reason}"
    note = f", slices of at least {verdict.shortest} tokens" if verdict.shortest > 1 else ""
    return f"{verdict.model:24s} exact    {verdict.seam} seam, largest error {verdict.worst:.1e}{note}"


def _print(verdict: "Verdict", parsed: argparse.Namespace) -> None:
    show.console.print(_line(verdict), markup=False)
    if verdict.exact:
        table = Table("parameters", "largest relative error", box=None, pad_edge=False)
        for group, error in verdict.groups:
            table.add_row(group, f"{error:.1e}")
        show.console.print(f"\nA small copy in {parsed.stages} stages and {parsed.slices} slices, against one piece:")
        show.console.print(table)
