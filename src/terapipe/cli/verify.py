"""``terapipe verify``: tests on a small copy whether a sliced Hugging Face model has exact gradients.

    $ terapipe verify llama
    llama                    exact    attention backend, largest error 2.8e-16

    A small copy in 2 stages and 4 slices, against the whole model:
    parameters                                      largest relative error
    lm_head.weight                                  7.8e-17
    loss                                            1.6e-16
    model.layers.*.mlp.down_proj.weight             1.6e-16
    ...

In Python: ``terapipe.hf.Decoder`` does the same before the first step of a Hugging Face model, and ``terapipe.verify``
for a model of your own. The verb takes one model (a type, a config.json, a folder), or with ``--all`` every causal-LM
type of the installed transformers. What is asked of each is in hf/verify/verification.py; here are the loop over types,
the confirmation of results, and what is printed:

    _verify    one VerifyResult per model: in this process, or with --tp in as many as the degree
    _confirm   --all only: another copy with other weights, stages and slices must be exact too, else it is "wrong"
    _counts    exact, refused and wrong, for each use: whole sequences, packed documents, dropout, losses of routers

torch and transformers are imported inside functions: ``terapipe --help`` and other verbs must not wait for them.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import isnan
from typing import TYPE_CHECKING, Any

from rich.table import Table

from terapipe.cli.options import Verbs, console
from terapipe.extras import install_line
from terapipe.planning.limits import LARGEST

if TYPE_CHECKING:
    from terapipe.hf.verify.verification import VerifyResult


def add(verbs: Verbs) -> None:
    """Adds the verb and its options.

    Args:
        verbs: Those of ``terapipe``.
    """
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
    """Runs the verb.

    Args:
        parsed: Its options.

    Returns:
        The exit code: 0 if the model is exact, 1 if gradients differ, 2 if it could not be computed at all; with
        ``--all``, 1 if a result could not be confirmed.
    """
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
    from terapipe.hf.verify.reference import uneven_lengths
    from terapipe.hf.verify.small_model import config_of

    uneven_lengths(parsed.num_slices, 1)  # raises ValueError for an impossible number before anything is built
    if parsed.all:
        return _all(parsed)
    result = next(_verify({parsed.model: config_of(parsed.model)}, parsed))
    if parsed.json:
        print(json.dumps(result.to_dict()))
    else:
        _print(result, parsed)
    return 0 if result.exact else 2 if isnan(result.worst) else 1


def _load_transformers() -> None:
    """Imports transformers and silences its warnings: 183 small models with random weights give hundreds of them.
    Raises ValueError with the line to install it if it is missing."""
    try:
        import transformers
    except ImportError:
        raise ValueError(f"this needs transformers; {install_line('hf')}") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _refuse_without_gpu(device: str) -> None:
    """Raises ValueError before any model is built; torch's own message would come in the middle of the first.

    Args:
        device: "cpu" or "cuda", as the option was given.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, and torch sees none here")


# Computing results


def _verify(configs: Mapping[str, Any], parsed: argparse.Namespace) -> Iterator["VerifyResult"]:
    """Yields the result of each model, as soon as it is there.

    Args:
        configs: By the model's name its small configuration, or a message why there is none.
        parsed: The options: numbers of stages and slices, device, degree of tensor parallel.
    """
    if parsed.tp == 1:
        return _results(configs, parsed.stages, parsed.num_slices, parsed.device)
    from terapipe.launch.processes import launch

    return iter(launch(_with_tensor_parallel, parsed.tp, parsed.tp, configs, parsed.stages, parsed.num_slices))


def _results(configs: Mapping[str, Any], stages: int, num_slices: int, device: str = "cpu") -> Iterator["VerifyResult"]:
    """Verifies each configuration in this process. One after the other, and lazily: a line is printed as soon as its
    model is through, where all of them take minutes.

    Args:
        configs: By the model's name its small configuration; a message in its place becomes a refusal.
        stages: Number of stages; a model with fewer layers gets as many as it has layers.
        num_slices: Of each sequence, of uneven lengths.
        device: Where the copies run.
    """
    import torch

    from terapipe.hf.verify.verification import ModelVerifier, VerifyResult

    torch.set_float32_matmul_precision("highest")  # float32, not TF32, whatever the surroundings allow
    for name, config in configs.items():
        if isinstance(config, str):
            yield VerifyResult(name, reason=config)
        else:
            yield ModelVerifier(name, config, num_stages=stages, num_slices=num_slices, device=device).verify()


def _with_tensor_parallel(
    degree: int, configs: Mapping[str, Any], stages: int, num_slices: int
) -> "list[VerifyResult]":
    """Verifies with tensor parallel. It runs on each of the processes that ``launch`` starts; each tests every model by
    itself first, and together they test those that are exact: with an inexact one, nothing could be said about tensor
    parallel.

    Args:
        degree: Number of processes.
        configs: As for ``_results``, sent to each process as a pickle.
        stages: Number of stages.
        num_slices: Of each sequence.
    """
    import torch
    import transformers
    from torch import distributed as dist

    from terapipe.hf.verify.verification import ModelVerifier
    from terapipe.planning.layout import Layout
    from terapipe.runtime.comm.mesh import device_mesh

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    mesh = device_mesh(Layout(1, 1, degree), device="cpu")["tp"]
    try:
        results = _results(configs, stages, num_slices)
        return [ModelVerifier(r.model, configs[r.model]).tensor_parallel(r, mesh) if r.exact else r for r in results]
    finally:
        dist.destroy_process_group()


def _all_configs() -> dict[str, Any]:
    """For each model type a small configuration, or a message why there is none."""
    from terapipe.hf.verify.small_model import causal_lm_types, config_of

    configs: dict[str, Any] = {}
    for name in causal_lm_types():
        try:
            configs[name] = config_of(name)
        except Exception as error:  # a type whose default config is invalid
            configs[name] = str(error).strip().replace("\n", " ")
    return configs


def _confirm(result: "VerifyResult", config: Any) -> dict[str, float]:
    """The errors of another small copy that is cut in another way, by use; empty if the model is refused anyway.

    One copy could be exact by luck, for example if two faults cancel for its lengths of slices.

    Args:
        result: Of the first copy. Its uses (packed documents, losses of routers) are tried again where they were exact.
        config: The small configuration that it was made from.
    """
    from terapipe.hf.backends import UnsupportedModelError
    from terapipe.hf.verify.verification import ModelVerifier

    errors = ModelVerifier(result.model, config).confirm(result) if result.exact else {}
    if errors and result.backend == "attention":
        with suppress(UnsupportedModelError):
            errors["dropout"] = _dropout_error(result, config)
    return errors


def _dropout_error(result: "VerifyResult", config: Any) -> float:
    """The largest difference of gradients with and without recomputation in a step with dropout.

    It is exactly 0 if the recomputed forward draws the same dropout masks as the first one: both then multiply the same
    numbers in the same order. So no bound is needed.
    """
    import torch

    from terapipe.hf.decoder import Decoder
    from terapipe.hf.refusals import with_dropout
    from terapipe.hf.verify.reference import Batch, uneven_lengths
    from terapipe.hf.verify.small_model import small_model
    from terapipe.planning.slices import Plan
    from terapipe.runtime.pipeline import Pipeline

    model = small_model(with_dropout(config), getattr(torch, result.dtype))
    batch, gradients = Batch.of(model), []
    decoder = Decoder(model, backend="attention")
    for recompute in decoder.recompute_modes:  # "none" first
        plan = Plan((2,), (uneven_lengths(4, 1),), (0, 1, decoder.num_layers), "terapipe", 2, recompute)
        pipe = Pipeline(decoder, plan, device="cpu")
        pipe.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe.step(batch.ids, batch.labels)
        gradients.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
    plain, *recomputed = gradients
    pairs = [(a, b) for other in recomputed for a, b in zip(plain, other, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


# All types


def _all(parsed: argparse.Namespace) -> int:
    """Tests all model types. A type that is refused is no failure: that is what the user of such a model sees, too.

    Args:
        parsed: The options.

    Returns:
        The exit code: 1 if a result could not be confirmed with another copy.
    """
    from importlib import metadata

    from terapipe.hf.verify.verification import BOUND

    results, wrong, with_dropout, configs = [], Counter[str](), 0, _all_configs()
    # Another copy for each type doubles the time, and says nothing about a device or a degree of tensor parallel.
    confirms = parsed.tp == 1 and parsed.device == "cpu"
    for result in _verify(configs, parsed):
        errors = _confirm(result, configs[result.model]) if confirms else {}
        results.append(result)
        wrong_uses = [use for use, error in errors.items() if not error <= (0 if use == "dropout" else BOUND)]
        wrong.update(wrong_uses)
        with_dropout += "dropout" in errors
        if not parsed.json:
            console.print(_line(result) + "".join(f", WRONG: {use}" for use in wrong_uses), markup=False)
    counts = _counts(results, wrong, with_dropout if confirms else None)
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


def _counts(results: "Sequence[VerifyResult]", wrong: Counter[str], dropout: int | None) -> dict[str, Any]:
    """Numbers of model types: exact by each backend; and exact, refused and wrong by each use.

    Args:
        results: Of all types.
        wrong: By use, how many results were not confirmed. They are not counted as exact.
        dropout: How many types were tried with dropout; None if nothing was confirmed: then only whole sequences and
            losses of routers are counted.
    """
    routers = [r for r in results if r.has_router_loss]
    exact = {
        "whole": (sum(r.exact for r in results), len(results)),
        "routers": (sum(r.router_exact for r in routers), len(routers)),
    }
    if dropout is not None:
        exact |= {"documents": (sum(r.documents_exact for r in results), len(results))}
        exact |= {"dropout": (dropout, len(results))}
    return {backend: sum(r.exact and r.backend == backend for r in results) for backend in ("attention", "cache")} | {
        use: {"exact": number - wrong[use], "refused": tried - number, "wrong": wrong[use]}
        for use, (number, tried) in exact.items()
    }


# Uses that are summed up beside whole sequences, and what they are called in the summary. Dropout is compared with
# recomputation: with slices alone, masks are others than those of the whole model.
USES = {"documents": "packed documents", "dropout": "recomputation with dropout", "routers": "losses of routers"}


def _sum_up(use: str, counts: Mapping[str, int]) -> str:
    """Returns one line, such as ``packed documents: 98 exact, 85 refused, 0 wrong``."""
    return f"{use}: " + ", ".join(f"{number} {what}" for what, number in counts.items())


def _line(result: "VerifyResult") -> str:
    """A model's result in one line: the backend and the largest error, or why it is refused::

    llama                    exact    attention backend, largest error 2.8e-16
    bloom                    refused  <the reason, as Decoder would raise it>
    """
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
    """The result of a single model: its line, and a table of errors by groups of parameters, such as all ``q_proj``."""
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
