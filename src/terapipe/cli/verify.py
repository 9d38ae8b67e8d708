"""``terapipe verify``: tests on a small copy whether a sliced Hugging Face model has exact gradients."""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import isnan
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
        help="test that a sliced Hugging Face model has exact gradients",
        description="Cuts a small copy of the model with random weights into stages and uneven slices, and compares "
        "loss and every gradient with the unmodified model, then again with packed documents. Exit code 1 if they "
        "differ, 2 if the model is not supported.",
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
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
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

    lengths(parsed.num_slices, 1)  # raises ValueError for an impossible number before anything is built
    if parsed.all:
        return _all(parsed)
    result = next(iter(_results({parsed.model: config_of(parsed.model)}, parsed)))
    if parsed.json:
        print(json.dumps(result.to_dict()))
    else:
        _print(result, parsed)
    return 0 if result.exact else 2 if isnan(result.worst) else 1


def load() -> None:
    """Imports transformers without its warnings. Raises ValueError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise ValueError("this needs transformers: pip install 'terapipe[hf]'") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def config_of(model: str) -> Any:
    """The config of a small copy of a model, given by folder, file, or model type (with its default config)."""
    from terapipe.modeling.hf.load import read_config
    from terapipe.modeling.hf.shrink import causal_lm_types, default_config, shrunken

    path = Path(model)
    if path.exists():
        return shrunken(read_config(path))
    if model not in causal_lm_types():
        raise ValueError(f"{model!r} is no file or folder here, and no causal-LM type of the installed transformers")
    return shrunken(default_config(model))


def sweep(stages: int = 2, slices: int = 4) -> Iterator[tuple["VerifyResult", dict[str, float]]]:
    """For each model type the result, and if it is exact, the errors of another copy that is cut in another way."""
    from terapipe.modeling.hf.attention_backend import UnsupportedModelError
    from terapipe.modeling.hf.verification import confirm

    configs = _all_configs()
    for result in _checked(configs, stages, slices):
        config = configs[result.model]
        errors = confirm(result, config) if result.exact else {}
        if result.exact and result.backend == "attention":
            with suppress(UnsupportedModelError):
                errors["dropout"] = _dropout_error(result, config)
        yield result, errors


def _all_configs() -> dict[str, Any]:
    """For each model type a small config, or a message why there is none."""
    from terapipe.modeling.hf.shrink import causal_lm_types

    configs: dict[str, Any] = {}
    for name in causal_lm_types():
        try:
            configs[name] = config_of(name)
        except Exception as error:  # a type whose default config is invalid
            configs[name] = str(error).strip().replace("\n", " ")
    return configs


def _checked(configs: dict[str, Any], stages: int, slices: int) -> Iterator["VerifyResult"]:
    from terapipe.modeling.hf.verification import VerifyResult, verify

    for name, config in configs.items():
        known = not isinstance(config, str)
        yield verify(name, config, stages=stages, slices=slices) if known else VerifyResult(name, reason=config)


def _results(configs: dict[str, Any], parsed: argparse.Namespace) -> Iterator["VerifyResult"]:
    if parsed.tp == 1:
        return _checked(configs, parsed.stages, parsed.num_slices)
    from terapipe.launch.processes import launch

    return iter(launch(_with_tensor_parallel, parsed.tp, parsed.tp, configs, parsed.stages, parsed.num_slices))


def _with_tensor_parallel(degree: int, configs: dict[str, Any], stages: int, slices: int) -> list["VerifyResult"]:
    """Runs on every process that `launch` starts."""
    import torch
    from torch import distributed as dist

    from terapipe.modeling.hf.verification import verify_tensor_parallel
    from terapipe.planning.layout import Layout
    from terapipe.runtime.mesh import device_mesh

    torch.set_num_threads(1)
    load()
    mesh = device_mesh(Layout(1, 1, degree), device="cpu")["tp"]
    try:
        results = _checked(configs, stages, slices)
        return [verify_tensor_parallel(r, configs[r.model], mesh) if r.exact else r for r in results]
    finally:
        dist.destroy_process_group()


def _dropout_error(result: "VerifyResult", config: Any) -> float:
    """The largest difference of gradients with and without recomputation in a step with dropout. It is 0 if the
    recomputed forward draws the same dropout masks."""
    import torch

    from terapipe.modeling.hf.comparison import Batch, lengths
    from terapipe.modeling.hf.decoder import Decoder
    from terapipe.modeling.hf.refusals import with_dropout
    from terapipe.modeling.hf.shrink import small_model
    from terapipe.planning.slices import Plan
    from terapipe.runtime.pipeline import Pipeline

    model = small_model(with_dropout(config), getattr(torch, result.dtype))
    batch, gradients = Batch.of(model), []
    decoder = Decoder(model, backend="attention")
    for recompute in (False, True):
        plan = Plan((2,), (lengths(4, 1),), (0, 1, decoder.num_layers), "terapipe", 2, recompute)
        pipe = Pipeline(decoder, plan, device="cpu")
        pipe.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe.step(batch.ids, batch.labels)
        gradients.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
    return max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))


def _all(parsed: argparse.Namespace) -> int:
    """Tests all model types. Exit code 1 if a result could not be confirmed with another copy."""
    from importlib import metadata

    from terapipe.modeling.hf.verification import BOUND

    results, wrong, with_dropout = [], Counter[str](), 0
    unconfirmed_results = ((result, dict[str, float]()) for result in _results(_all_configs(), parsed))
    for result, errors in sweep(parsed.stages, parsed.num_slices) if parsed.tp == 1 else unconfirmed_results:
        results.append(result)
        wrong_uses = [use for use, error in errors.items() if not error <= (0 if use == "dropout" else BOUND)]
        wrong.update(wrong_uses)
        with_dropout += "dropout" in errors
        if not parsed.json:
            show.console.print(_line(result) + "".join(f", WRONG: {use}" for use in wrong_uses), markup=False)
    counts = _counts(results, with_dropout, wrong) if parsed.tp == 1 else _exact(results)
    if parsed.json:
        rows = [{key: value for key, value in r.to_dict().items() if key != "groups"} for r in results]
        print(json.dumps({"transformers": metadata.version("transformers"), **counts, "models": rows}))
    else:
        backends = f"{counts['attention']} by the attention backend, {counts['cache']} by the cache backend"
        show.console.print(f"\n{_sum_up('whole sequences', counts['whole'])} ({backends})")
        for use, title in (("documents", "packed documents"), ("dropout", "recomputation with dropout")):
            if use in counts:
                show.console.print(_sum_up(title, counts[use]))
    return 1 if wrong else 0


def _exact(results: Sequence["VerifyResult"]) -> dict[str, Any]:
    """Numbers of exact models, by backend and in all."""
    counts: dict[str, Any] = {b: sum(r.exact and r.backend == b for r in results) for b in ("attention", "cache")}
    exact = sum(r.exact for r in results)
    return {**counts, "whole": {"exact": exact, "refused": len(results) - exact, "wrong": 0}}


def _counts(results: Sequence["VerifyResult"], with_dropout: int, wrong: Mapping[str, int]) -> dict[str, Any]:
    """As ``_exact``, also for packed documents and dropout. ``wrong`` counts results that were not confirmed."""
    counts = _exact(results)
    documents = sum(r.documents_exact for r in results)
    for use, exact in (("whole", counts["whole"]["exact"]), ("documents", documents), ("dropout", with_dropout)):
        failed = wrong.get(use, 0)
        counts[use] = {"exact": exact - failed, "refused": len(results) - exact, "wrong": failed}
    return counts


def _sum_up(use: str, counts: Mapping[str, int]) -> str:
    return f"{use}: " + ", ".join(f"{number} {what}" for what, number in counts.items())


def _line(result: "VerifyResult") -> str:
    if not result.exact:
        return f"{result.model:24s} refused  {result.reason}"
    note = f", slices of at least {result.shortest} tokens" if result.shortest > 1 else ""
    documents = "" if result.documents_exact else f"; packed documents refused: {result.documents_reason}"
    return f"{result.model:24s} exact    {result.backend} backend, largest error {result.worst:.1e}{note}{documents}"


def _print(result: "VerifyResult", parsed: argparse.Namespace) -> None:
    show.console.print(_line(result), markup=False)
    if result.exact:
        table = Table("parameters", "largest relative error", box=None, pad_edge=False)
        for group, error in result.groups:
            table.add_row(group, f"{error:.1e}")
        tp = f", with tensor parallel {parsed.tp}" if parsed.tp > 1 else ""
        show.console.print(
            f"\nA small copy in {parsed.stages} stages and {parsed.num_slices} slices{tp}, against the whole model:"
        )
        show.console.print(table)
