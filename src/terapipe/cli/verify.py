"""``terapipe verify``: whether a Hugging Face model is exact when it is cut, proved on a small copy."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from terapipe.cli import show
from terapipe.cli.options import Verbs

if TYPE_CHECKING:
    from terapipe.modeling.hf.verification import VerifyResult


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "verify",
        help="prove that a Hugging Face model is exact when it is cut",
        description="Cuts a small random copy of the model into stages and uneven slices, and compares loss and every "
        "gradient with the model in one piece, then with packed documents. Exit code 1 if they differ, 2 if the model "
        "cannot be cut.",
    )
    parser.add_argument("model", nargs="?", help="a model type such as llama, a config.json, or a model's folder")
    parser.add_argument("--all", action="store_true", help="every causal-LM type of the installed transformers")
    parser.add_argument("--stages", type=int, default=2, help="stages (default 2)")
    parser.add_argument("--num-slices", type=int, default=4, help="slices of 29 tokens (default 4)")
    parser.add_argument(
        "--tp", type=int, default=1, help="tensor parallel over so many processes, by the model's own plan (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    if bool(parsed.model) == parsed.all:
        raise ValueError("give one model, or --all")
    if parsed.stages < 1:
        raise ValueError(f"--stages must be at least 1, got {parsed.stages}")
    if parsed.tp < 1:
        raise ValueError(f"--tp must be at least 1, got {parsed.tp}")
    load()
    from terapipe.modeling.hf.comparison import lengths

    lengths(parsed.num_slices, 1)  # refuses before anything is built
    if parsed.all:
        return _all(parsed)
    verdict = next(iter(_found({parsed.model: config_of(parsed.model)}, parsed)))
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
    """That of a small copy: from a folder, a file, or a type's defaults."""
    from terapipe.modeling.hf.load import read_config
    from terapipe.modeling.hf.shrink import causal_lm_types, default_config, shrunken

    path = Path(model)
    if path.exists():
        return shrunken(read_config(path))
    if model not in causal_lm_types():
        raise ValueError(f"{model!r} is no file or folder here, and no causal-LM type of the installed transformers")
    return shrunken(default_config(model))


def sweep(stages: int = 2, slices: int = 4) -> Iterator[tuple["VerifyResult", dict[str, float]]]:
    """Of each type the verdict, and the errors of another copy, cut otherwise, in what the verdict calls exact."""
    from terapipe.modeling.hf.attention_backend import UnsupportedModelError
    from terapipe.modeling.hf.verification import confirm

    configs = _all_configs()
    for verdict in _checked(configs, stages, slices):
        config = configs[verdict.model]
        found = confirm(verdict, config) if verdict.exact else {}
        if verdict.exact and verdict.backend == "attention":
            with suppress(UnsupportedModelError):
                found["dropout"] = _recomputed(verdict, config)
        yield verdict, found


def _all_configs() -> dict[str, Any]:
    """Of each type, a small configuration, or why there is none."""
    from terapipe.modeling.hf.shrink import causal_lm_types

    found: dict[str, Any] = {}
    for name in causal_lm_types():
        try:
            found[name] = config_of(name)
        except Exception as error:  # a type whose own defaults are invalid
            found[name] = str(error).strip().replace("\n", " ")
    return found


def _checked(configs: dict[str, Any], stages: int, slices: int) -> Iterator["VerifyResult"]:
    from terapipe.modeling.hf.verification import VerifyResult, verify

    for name, config in configs.items():
        known = not isinstance(config, str)
        yield verify(name, config, stages=stages, slices=slices) if known else VerifyResult(name, reason=config)


def _found(configs: dict[str, Any], parsed: argparse.Namespace) -> Iterator["VerifyResult"]:
    if parsed.tp == 1:
        return _checked(configs, parsed.stages, parsed.num_slices)
    from terapipe.launch.processes import launch

    return iter(launch(_with_tensor_parallel, parsed.tp, parsed.tp, configs, parsed.stages, parsed.num_slices))


def _with_tensor_parallel(degree: int, configs: dict[str, Any], stages: int, slices: int) -> list["VerifyResult"]:
    """On every process that `launch` starts."""
    import torch
    from torch import distributed as dist

    from terapipe.modeling.hf.verification import verify_tensor_parallel
    from terapipe.planning.layout import Layout
    from terapipe.runtime.mesh import device_mesh

    torch.set_num_threads(1)
    load()
    mesh = device_mesh(Layout(1, 1, degree), device="cpu")["tp"]
    try:
        verdicts = _checked(configs, stages, slices)
        return [verify_tensor_parallel(v, configs[v.model], mesh) if v.exact else v for v in verdicts]
    finally:
        dist.destroy_process_group()


def _recomputed(verdict: "VerifyResult", config: Any) -> float:
    """How much the gradients of a step in training mode, with dropout, differ where slices are computed again in the
    backward; not at all, if they draw the same."""
    import torch

    from terapipe.modeling.hf.comparison import Batch, lengths
    from terapipe.modeling.hf.decoder import Decoder
    from terapipe.modeling.hf.refusals import with_dropout
    from terapipe.modeling.hf.shrink import small_model
    from terapipe.planning.slices import Plan
    from terapipe.runtime.pipeline import Pipeline

    model = small_model(with_dropout(config), getattr(torch, verdict.dtype))
    batch, found = Batch.of(model), []
    decoder = Decoder(model, backend="attention")
    for recompute in (False, True):
        plan = Plan((2,), (lengths(4, 1),), (0, 1, decoder.num_layers), "terapipe", 2, recompute)
        pipe = Pipeline(decoder, plan, device="cpu")
        pipe.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe.step(batch.ids, batch.labels)
        found.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def _all(parsed: argparse.Namespace) -> int:
    """Exit code 1 if any verdict was not confirmed."""
    from importlib import metadata

    from terapipe.modeling.hf.verification import BOUND

    verdicts, wrong, same = [], Counter[str](), 0
    alone = ((verdict, dict[str, float]()) for verdict in _found(_all_configs(), parsed))
    for verdict, found in sweep(parsed.stages, parsed.num_slices) if parsed.tp == 1 else alone:
        verdicts.append(verdict)
        unconfirmed = [use for use, error in found.items() if not error <= (0 if use == "dropout" else BOUND)]
        wrong.update(unconfirmed)
        same += "dropout" in found
        if not parsed.json:
            show.console.print(_line(verdict) + "".join(f", WRONG: {use}" for use in unconfirmed), markup=False)
    counts = _counts(verdicts, same, wrong) if parsed.tp == 1 else _exact(verdicts)
    if parsed.json:
        rows = [{key: value for key, value in v.to_dict().items() if key != "groups"} for v in verdicts]
        print(json.dumps({"transformers": metadata.version("transformers"), **counts, "models": rows}))
    else:
        backends = f"{counts['attention']} by the attention backend, {counts['cache']} by the cache backend"
        show.console.print(f"\n{_sum_up('whole sequences', counts['whole'])} ({backends})")
        for use, title in (("documents", "packed documents"), ("dropout", "dropout, computed again")):
            if use in counts:
                show.console.print(_sum_up(title, counts[use]))
    return 1 if wrong else 0


def _exact(verdicts: Sequence["VerifyResult"]) -> dict[str, Any]:
    """By seam, and of whole sequences."""
    counts: dict[str, Any] = {b: sum(v.exact and v.backend == b for v in verdicts) for b in ("attention", "cache")}
    exact = sum(v.exact for v in verdicts)
    return {**counts, "whole": {"exact": exact, "refused": len(verdicts) - exact, "wrong": 0}}


def _counts(verdicts: Sequence["VerifyResult"], recomputed: int, wrong: Mapping[str, int]) -> dict[str, Any]:
    """And of other uses; ``wrong`` are those that were not confirmed."""
    counts = _exact(verdicts)
    documents = sum(v.documents_exact for v in verdicts)
    for use, exact in (("whole", counts["whole"]["exact"]), ("documents", documents), ("dropout", recomputed)):
        failed = wrong.get(use, 0)
        counts[use] = {"exact": exact - failed, "refused": len(verdicts) - exact, "wrong": failed}
    return counts


def _sum_up(use: str, counts: Mapping[str, int]) -> str:
    return f"{use}: " + ", ".join(f"{number} {what}" for what, number in counts.items())


def _line(verdict: "VerifyResult") -> str:
    if not verdict.exact:
        return f"{verdict.model:24s} refused  {verdict.reason}"
    note = f", slices of at least {verdict.shortest} tokens" if verdict.shortest > 1 else ""
    documents = "" if verdict.documents_exact else f"; packed documents refused: {verdict.documents_reason}"
    return f"{verdict.model:24s} exact    {verdict.backend} backend, largest error {verdict.worst:.1e}{note}{documents}"


def _print(verdict: "VerifyResult", parsed: argparse.Namespace) -> None:
    show.console.print(_line(verdict), markup=False)
    if verdict.exact:
        table = Table("parameters", "largest relative error", box=None, pad_edge=False)
        for group, error in verdict.groups:
            table.add_row(group, f"{error:.1e}")
        over = f", with tensor parallel {parsed.tp}" if parsed.tp > 1 else ""
        show.console.print(
            f"\nA small copy in {parsed.stages} stages and {parsed.num_slices} slices{over}, against one piece:"
        )
        show.console.print(table)
