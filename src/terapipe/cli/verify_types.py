"""Verification of Hugging Face models on small copies: one model or all types, sliced, with packed documents, with
recomputation under dropout, with the loss of routers, and tensor parallel."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed as dist

from terapipe.hf.attention_backend import UnsupportedModelError
from terapipe.hf.decoder import Decoder
from terapipe.hf.refusals import with_dropout
from terapipe.hf.verify.reference import Batch, uneven_lengths
from terapipe.hf.verify.small_model import causal_lm_types, default_config, shrink_config, small_model
from terapipe.hf.verify.verification import ModelVerifier, VerifyResult
from terapipe.hf.weights import read_config
from terapipe.launch.processes import launch
from terapipe.planning.layout import Layout
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.mesh import device_mesh
from terapipe.runtime.pipeline import Pipeline


def config_of(model: str) -> Any:
    """The config of a small copy of a model, given by folder, file, or model type (with its default config)."""
    path = Path(model)
    if path.exists():
        return shrink_config(read_config(path))
    if model not in causal_lm_types():
        raise ValueError(f"{model!r} is no file or folder here, and no causal-LM type of the installed transformers")
    return shrink_config(default_config(model))


def verify_model(model: str, stages: int, slices: int, tp: int = 1, device: str = "cpu") -> VerifyResult:
    return next(_results({model: config_of(model)}, stages, slices, tp, device))


def verify_all(
    stages: int, slices: int, tp: int = 1, device: str = "cpu"
) -> Iterator[tuple[VerifyResult, dict[str, float]]]:
    """For each model type the result; if it is exact, on the CPU and without tensor parallel also the errors of another
    copy that is cut in another way."""
    configs = _all_configs()
    for result in _results(configs, stages, slices, tp, device):
        config = configs[result.model]
        errors = (
            ModelVerifier(result.model, config).confirm(result) if result.exact and tp == 1 and device == "cpu" else {}
        )
        if errors and result.backend == "attention":
            with suppress(UnsupportedModelError):
                errors["dropout"] = _dropout_error(result, config)
        yield result, errors


def count(results: Sequence[VerifyResult]) -> dict[str, Any]:
    """Numbers of exact models, by backend and in all."""
    counts: dict[str, Any] = {b: sum(r.exact and r.backend == b for r in results) for b in ("attention", "cache")}
    exact = sum(r.exact for r in results)
    with_routers = [r for r in results if r.has_router_loss]
    routers = sum(r.router_exact for r in with_routers)
    return {
        **counts,
        "whole": {"exact": exact, "refused": len(results) - exact, "wrong": 0},
        "routers": {"exact": routers, "refused": len(with_routers) - routers, "wrong": 0},
    }


def count_uses(results: Sequence[VerifyResult], dropout: int, wrong: Mapping[str, int]) -> dict[str, Any]:
    """As ``count``, also for packed documents and dropout. ``wrong`` counts results that were not confirmed."""
    counts = count(results)
    documents = sum(r.documents_exact for r in results)
    for use, exact in (("whole", counts["whole"]["exact"]), ("documents", documents), ("dropout", dropout)):
        failed = wrong.get(use, 0)
        counts[use] = {"exact": exact - failed, "refused": len(results) - exact, "wrong": failed}
    failed = wrong.get("routers", 0)
    counts["routers"] |= {"exact": counts["routers"]["exact"] - failed, "wrong": failed}
    return counts


def _all_configs() -> dict[str, Any]:
    """For each model type a small config, or a message why there is none."""
    configs: dict[str, Any] = {}
    for name in causal_lm_types():
        try:
            configs[name] = config_of(name)
        except Exception as error:  # a type whose default config is invalid
            configs[name] = str(error).strip().replace("\n", " ")
    return configs


def _results(configs: dict[str, Any], stages: int, slices: int, tp: int, device: str) -> Iterator[VerifyResult]:
    if tp == 1:
        return _verified(configs, stages, slices, device)
    return iter(launch(_with_tensor_parallel, tp, tp, configs, stages, slices))


def _verified(configs: dict[str, Any], stages: int, slices: int, device: str = "cpu") -> Iterator[VerifyResult]:
    """In float32 that is float32, not TF32, whatever the surroundings allow."""
    torch.set_float32_matmul_precision("highest")
    for name, config in configs.items():
        if isinstance(config, str):
            yield VerifyResult(name, reason=config)
        else:
            yield ModelVerifier(name, config, num_stages=stages, num_slices=slices, device=device).verify()


def _with_tensor_parallel(degree: int, configs: dict[str, Any], stages: int, slices: int) -> list[VerifyResult]:
    """Runs on every process that `launch` starts."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    mesh = device_mesh(Layout(1, 1, degree), device="cpu")["tp"]
    try:
        results = _verified(configs, stages, slices)
        return [ModelVerifier(r.model, configs[r.model]).tensor_parallel(r, mesh) if r.exact else r for r in results]
    finally:
        dist.destroy_process_group()


def _dropout_error(result: VerifyResult, config: Any) -> float:
    """The largest difference of gradients with and without recomputation in a step with dropout. It is 0 if the
    recomputed forward draws the same dropout masks."""
    model = small_model(with_dropout(config), getattr(torch, result.dtype))
    batch, gradients = Batch.of(model), []
    decoder = Decoder(model, backend="attention")
    for recompute in decoder.recompute_modes:
        plan = Plan((2,), (uneven_lengths(4, 1),), (0, 1, decoder.num_layers), "terapipe", 2, recompute)
        pipe = Pipeline(decoder, plan, device="cpu")
        pipe.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe.step(batch.ids, batch.labels)
        gradients.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
    kept, *again = gradients
    pairs = [(a, b) for other in again for a, b in zip(kept, other, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)
