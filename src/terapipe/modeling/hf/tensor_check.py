"""Proves on a small copy that a model's plan for tensor parallel changes nothing, as ``check`` does for slices."""

from dataclasses import replace
from math import gcd

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from transformers import PretrainedConfig

from terapipe.modeling.hf import check as slices
from terapipe.modeling.hf.attention_backend import UnsupportedModelError
from terapipe.modeling.hf.check import BOUND, VerifyResult
from terapipe.modeling.hf.shrink import HEAD_COUNTS, KV_HEADS, small_model
from terapipe.modeling.hf.trial import Batch, Cut, CutModel, errors, in_one_piece, lengths
from terapipe.modeling.stage import TensorParallel


def check_tensor_parallel(verdict: VerifyResult, config: PretrainedConfig, mesh: DeviceMesh) -> VerifyResult:
    """What ``check`` found for this small configuration, and whether that is so with tensor parallel over this mesh.
    All its ranks call it together, and get the same."""
    degree = mesh.size()
    groups: dict[str, float] = {}
    reason = ""
    try:
        groups = _errors(verdict, _widened(config, degree), mesh)
    except Exception as error:  # whatever a model's own code raises, or DTensor
        reason = slices._first_line(error)
    if _largest([float(bool(reason))], mesh) != [0.0]:
        reason = reason or "it failed on another device"
        return replace(verdict, backend=None, worst=float("nan"), reason=f"tensor {degree}: {reason}")
    groups = dict(zip(groups, _largest(list(groups.values()), mesh), strict=True))
    worst = max(groups, key=lambda group: groups[group])
    if not groups[worst] <= BOUND:
        reason = f"tensor {degree}: gradients of {worst} differ by {groups[worst]:.1e}"
        return replace(verdict, backend=None, worst=groups[worst], reason=reason)
    return replace(verdict, worst=max(verdict.worst, groups[worst]), groups=tuple(sorted(groups.items())))


def prove_tensor_parallel(verdict: VerifyResult, config: PretrainedConfig, mesh: DeviceMesh) -> None:
    """Refuses a model, on all ranks alike, whose plan is not exact."""
    found = check_tensor_parallel(verdict, config, mesh)
    if not found.exact:
        raise UnsupportedModelError(
            f"tensor parallel by the tp_plan of {found.model} is not exact: {found.reason}; take tensor 1"
        )


def _errors(verdict: VerifyResult, config: PretrainedConfig, mesh: DeviceMesh) -> dict[str, float]:
    assert verdict.parts is not None
    with slices._quietly():
        model = small_model(config)
        batch = Batch.of(model)
        cut = Cut(verdict.parts.of(model), verdict.backend, split=TensorParallel(mesh))
        return errors(in_one_piece(model, batch), CutModel(model, cut)(batch, lengths(4, verdict.shortest)))


def _largest(mine: list[float], mesh: DeviceMesh) -> list[float]:
    """Of all devices, on all of them."""
    values = torch.tensor(mine, dtype=torch.float64, device=mesh.device_type)
    found: list[float] = DTensor.from_local(values, mesh, [Partial("max")], run_check=False).full_tensor().tolist()
    return found


def _widened(config: PretrainedConfig, degree: int) -> PretrainedConfig:
    """With so many heads that they can be split over the devices. Small copies have 1, 2 or 4 of keys and values."""
    factor = degree // gcd(degree, 2)
    if factor == 1:
        return config
    values = config.to_dict()
    wide = {name: factor * values[name] for name in f"{HEAD_COUNTS} {KV_HEADS}".split() if values.get(name)}
    return type(config).from_dict(values | wide)
