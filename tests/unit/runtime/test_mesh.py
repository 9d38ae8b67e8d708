"""Which ranks may share an operator, and meshes whose dimensions have other names."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terapipe import Layout, Pipeline, Plan
from terapipe.modeling.compiling import compile_layers
from terapipe.modeling.stage import IGNORE
from terapipe.runtime.comm.environment import local_device
from terapipe.runtime.comm.mesh import check_hosts
from tests.support.models import gradients, make_batch, make_model, variant, worst_error
from tests.support.ranks import Ranks

CONFIG = variant(tied=True, kv_heads=2)
_meshes: dict[tuple[str, ...], DeviceMesh] = {}


def test_parts_of_one_host_are_accepted() -> None:
    check_hosts(Layout(2, 1, 2), ["a", "a", "b", "b"])
    check_hosts(Layout(1, 3, 1), ["a", "b", "a"])


def test_an_operator_over_two_hosts_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="of one host, got ranks 2 to 3 on a, b for dp 1 x pp 2 x tp 2; take a"):
        check_hosts(Layout(1, 2, 2), ["a", "a", "a", "b"])


def two_by_two(*names: str) -> DeviceMesh:
    if names not in _meshes:
        _meshes[names] = init_device_mesh(local_device().type, (2, 2), mesh_dim_names=names)
    return _meshes[names]


def named(names: tuple[str, str], dims: dict[str, str], shard: bool) -> tuple[float, dict[str, Tensor], float]:
    mesh = two_by_two(*names)
    boundaries = (0, 1, 4) if "pp" in dims else (0, 4)
    plan = Plan((1,), ((10, 2, 12, 4),), boundaries, "terapipe-1f1b")
    pipe = Pipeline(make_model(CONFIG), plan, mesh=mesh, mesh_dims=dims, shard=shard, timeout=300.0)
    ids, labels = make_batch(CONFIG, 2, 28, ignored=True)
    rows = slice(pipe.dp_rank, pipe.dp_rank + 1) if "dp" in dims else slice(0, 1)
    loss = pipe.step(ids[rows], labels[rows]).item()
    if "tp" in dims:
        with pytest.raises(ValueError, match="cannot be compiled; take tp 1"):
            compile_layers(next(iter(pipe.stages.values())))
    return loss, gradients(pipe), pipe.grad_norm().item()


@pytest.mark.exhaustive_ids(r"^\('replicate', 'tensor'")
@pytest.mark.parametrize(
    ("names", "dims", "shard"),
    [
        (("replicate", "stage"), {"dp": "replicate", "pp": "stage"}, False),
        (("replicate", "stage"), {"pp": "stage", "dp": "replicate"}, True),
        (("stage", "tensor"), {"tp": "tensor", "pp": "stage"}, False),
        (("replicate", "tensor"), {"dp": "replicate", "tp": "tensor"}, True),
        (("pp", "tp"), {"dp": "pp", "pp": "tp"}, False),  # whatever they are called
        (("group", "stage"), {"pp": "stage"}, False),  # two pipelines side by side
    ],
    ids=str,
)
def test_dimensions_of_a_mesh_may_have_any_name(
    ranks: Callable[[int], Ranks], names: tuple[str, str], dims: dict[str, str], shard: bool
) -> None:
    model = make_model(CONFIG)
    rows = 2 if "dp" in dims else 1
    ids, labels = (x[:rows] for x in make_batch(CONFIG, 2, 28, ignored=True))
    loss = model.loss(model(ids), labels) / (labels != IGNORE).sum()
    loss.backward()
    wanted = loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(list(wanted[1].values())).item()
    found = ranks(4)(named, names, dims, shard)
    assert worst_error(wanted, [part[:2] for part in found], CONFIG) < 1e-12
    assert all(part[2] == pytest.approx(norm, rel=1e-10) for part in found)


def refused() -> list[str]:
    mesh, said = two_by_two("replicate", "stage"), []
    plan = Plan((1,), ((28,),), (0, 1, 4))
    for given, dims in (
        (mesh, None), (mesh, {"data": "replicate"}), (mesh, {"dp": "stage", "pp": "stage"}), (mesh, {"pp": "pipe"}),
        (mesh, {}), (None, {"pp": "stage"}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="mesh") as caught:
            Pipeline(make_model(CONFIG), plan, mesh=given, mesh_dims=dims)
        said.append(str(caught.value))
    return said


def test_names_that_do_not_fit_are_refused(ranks: Callable[[int], Ranks]) -> None:
    first, *others, alone = ranks(4)(refused)[0]
    assert first.startswith("the dimensions of a mesh are dp, pp and tp, got ('replicate', 'stage'); make it with")
    assert all("which are ('replicate', 'stage'), got {" in other for other in others)
    assert alone == "mesh_dims names dimensions of a mesh, got {'pp': 'stage'} without mesh="
