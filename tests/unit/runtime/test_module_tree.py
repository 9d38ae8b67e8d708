"""A Pipeline as a torch module: names, state, hooks, and the state-dict functions of torch.distributed.checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from terapipe import GPT, Layout, Pipeline, PipelineModel, Plan, SliceCache, Stage
from terapipe.modeling.gpt import Block
from terapipe.modeling.stage import IGNORE
from terapipe.runtime.checkpoint.state import without_dist_warning
from terapipe.training.optimizer import MasterAdamW
from tests.support.models import TINY, make_batch, make_model, mesh_of, variant, whole
from tests.support.ranks import Ranks

LENGTHS = ((9, 1, 12, 6),)
PLANS = {
    "terapipe": (0, 1, 4),
    "terapipe-1f1b": (0, 1, 4),
    "terapipe-deferred": (0, 1, 4),
    "terapipe-v": (0, 1, 2, 3, 4),
    "terapipe-zb": (0, 1, 4),
    "interleaved": (0, 1, 2, 3, 4),
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def plan_for(order: str, pp: int) -> Plan:
    chunks = 2 if order in ("terapipe-v", "interleaved") else 1
    return Plan((1,), LENGTHS, PLANS[order] if pp == 2 else (0, 4), order, chunks if pp == 2 else 1)


def pipeline(order: str, layout: Layout, shard: bool = False, seed: int = 3) -> Pipeline:
    model = make_model(variant(tied=True)) if seed == 3 else GPT(variant(tied=True), seed=seed).double()
    mesh = mesh_of(layout) if layout.devices > 1 else None
    return Pipeline(model, plan_for(order, layout.pp), mesh=mesh, shard=shard, timeout=300.0)


def adam(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=0.01)


def train(pipe: Pipeline, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        pipe.step(*make_batch(TINY, 1, 28, ignored=True, seed=seed))
        optimizer.step()
        pipe.zero_grad()


def local(x: Tensor) -> Tensor:
    part = x.to_local() if isinstance(x, DTensor) else x
    return part.detach().clone()


def snapshot(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: local(p) for name, p in pipe.named_parameters()}
    for name, p in pipe.named_parameters():
        found |= {f"{name}.{key}": local(x) for key, x in optimizer.state.get(p, {}).items()}
    return found


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Names and state


def names_here(order: str, layout: Layout) -> dict[str, list[str]]:
    pipe = pipeline(order, layout)
    for name, p in pipe.named_parameters():
        assert pipe.get_parameter(name) is p
    state = pipe.state_dict()
    assert state.keys() >= dict(pipe.named_parameters()).keys()
    layers = [name for name, module in pipe.named_modules() if isinstance(module, Block)]
    return {"state": list(state), "parameters": [name for name, _ in pipe.named_parameters()], "layers": layers}


@pytest.mark.parametrize("order", ["terapipe", "terapipe-v", "interleaved"])
def test_the_ranks_hold_the_whole_model_under_its_names(ranks: Callable[[int], Ranks], order: str) -> None:
    found = ranks(2)(names_here, order, Layout(1, 2, 1))
    model = GPT(variant(tied=True))
    for kind in ("state", "layers"):
        listed = [name for part in found for name in part[kind]]
        assert len(listed) == len(set(listed))
    assert {name for part in found for name in part["state"]} == set(model.state_dict())
    assert {name for part in found for name in part["layers"]} == {f"layers.{i}" for i in range(4)}
    parameters = {name for part in found for name in part["parameters"]}
    assert parameters | {"head.weight"} == set(model.state_dict())  # with both ends on one rank it is listed once


def test_in_one_process_it_lists_what_the_model_lists() -> None:
    model = make_model(TINY)
    pipe = Pipeline(model, plan_for("terapipe", 1))
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert pipe.get_submodule("layers.2.attention") is model.layers["2"].attention
    again = Pipeline(GPT(TINY, seed=9).double(), plan_for("terapipe", 1))
    again.load_state_dict(pipe.state_dict())
    assert equal(dict(again.state_dict()), dict(model.state_dict()))
    with pytest.raises(RuntimeError, match="Missing key"):
        again.load_state_dict({})
    with pytest.raises(ValueError, match="cannot be replaced; load with assign=False"):
        again.load_state_dict(pipe.state_dict(), assign=True)


def part_of_whole(order: str) -> bool:
    whole_state = make_model(variant(tied=True)).state_dict()
    pipe = pipeline(order, Layout(1, 2, 1), seed=9)
    found = pipe.load_state_dict(whole_state, strict=False)
    assert not found.missing_keys
    assert set(found.unexpected_keys) == whole_state.keys() - pipe.state_dict().keys()
    return equal(dict(pipe.state_dict()), {name: whole_state[name] for name in pipe.state_dict()})


def test_a_whole_models_state_may_be_loaded_in_part(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(part_of_whole, "terapipe-v") == [True, True]


class Renaming(Stage):
    """A stage whose layers are numbered from zero in its modules, and as in the whole model in its names; with a buffer
    that both stages hold."""

    def __init__(self, stage: nn.Module, first: int, last: int) -> None:
        super().__init__()
        self.inner, self.first, self.hidden_size = stage, first, stage.hidden_size
        self.layers = nn.ModuleList(stage.layers[str(i)] for i in range(first, last))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        stage.layers = nn.ModuleDict()

    def _name(self, name: str) -> str:
        head, number, *rest = name.removeprefix("inner.").split(".")
        return (
            ".".join([head, str(int(number) + self.first), *rest])
            if head == "layers"
            else ".".join([head, number, *rest])
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((self._name(name), p) for name, p in super().named_parameters(*args, **kwargs))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return {name if name == "seen" else self._name(name): x for name, x in found.items()}

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        x = self.inner(x, cache)
        for layer in self.layers:
            x = layer(x, cache)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)


class RenamingModel(PipelineModel):
    def __init__(self) -> None:
        self.model = make_model(variant(tied=False))
        self.num_layers = 4

    def stage(self, first: int, last: int, device: torch.device, tp: Any = None) -> Stage:
        return Renaming(self.model.stage(first, last, device), first, last)


def test_a_stage_may_rename_its_modules() -> None:
    plan = Plan((1,), LENGTHS, (0, 1, 4), "terapipe", chunks=2)
    pipe = Pipeline(RenamingModel(), plan)
    wanted = make_model(variant(tied=False))
    assert set(dict(pipe.named_parameters())) == set(dict(wanted.named_parameters()))
    ids, labels = make_batch(TINY, 1, 28, ignored=True)
    pipe.step(ids, labels)
    (wanted.loss(wanted(ids), labels) / (labels != IGNORE).sum()).backward()
    for name, p in wanted.named_parameters():
        torch.testing.assert_close(pipe.get_parameter(name).grad, p.grad)
    state = {name: x + 1 for name, x in pipe.state_dict().items()}
    pipe.load_state_dict(state)
    for stage in pipe.stages.values():
        assert torch.equal(stage.seen, torch.ones(2, dtype=torch.float64)), "both stages have their copy"


class Forgetful(Renaming):
    """Whose state has not all of its buffers."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: x for name, x in super().state_dict(*args, **kwargs).items() if name != "seen"}


class Undecided(Renaming):
    """Whose state has other names than its parameters."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.state_dict(self, *args, **kwargs)


class Scattering(Renaming):
    """Which gives weight and bias of one module to two."""

    def _name(self, name: str) -> str:
        return super()._name(name).replace("norm.bias", "elsewhere.bias")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Undecided, "Undecided must have one name for a parameter, got embedding.weight and inner"),
        (Scattering, "each as a whole"),
    ],
)
def test_names_that_are_left_open_are_refused(kind: type[Renaming], said: str) -> None:
    """The parameters were in the tree under both names, and saved under either."""

    class Model(RenamingModel):
        def stage(self, first: int, last: int, device: torch.device, tp: Any = None) -> Stage:
            return kind(self.model.stage(first, last, device), first, last)

    with pytest.raises(ValueError, match=said):
        Pipeline(Model(), Plan((1,), LENGTHS, (0, 1, 4), "terapipe", chunks=2))


class Colliding(Stage):
    hidden_size = 2

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(2, 2))


def test_names_that_cannot_be_taken_are_refused() -> None:
    class Model(RenamingModel):
        def stage(self, first: int, last: int, device: torch.device, tp: Any = None) -> Stage:
            return Colliding("step")

    with pytest.raises(ValueError, match="must not have the names of Pipeline's own attributes, got 'step'"):
        Pipeline(Model(), Plan((1,), LENGTHS, (0, 4)), verify=False)

    class Lacking(RenamingModel):
        def stage(self, first: int, last: int, device: torch.device, tp: Any = None) -> Stage:
            return Forgetful(self.model.stage(first, last, device), first, last)

    with pytest.raises(ValueError, match="state_dict of Forgetful must have the entries"):
        Pipeline(Lacking(), Plan((1,), LENGTHS, (0, 1, 4), "terapipe", chunks=2))

    class Doubled(RenamingModel):
        def stage(self, first: int, last: int, device: torch.device, tp: Any = None) -> Stage:
            return Colliding("same")

    with pytest.raises(ValueError, match=r"different parameters of the name same\.weight"):
        Pipeline(Doubled(), Plan((1,), LENGTHS, (0, 1, 4), "terapipe", chunks=2), verify=False)


def test_modes_reach_every_module_and_devices_stay() -> None:
    pipe = Pipeline(make_model(TINY), Plan((1,), LENGTHS, (0, 1, 4), "terapipe", chunks=2))
    assert pipe.training
    assert pipe.eval() is pipe
    assert not any(module.training for stage in pipe.stages.values() for module in [stage, *stage.modules()])
    assert pipe.to("cpu") is pipe
    assert pipe.double() is pipe
    for change in (pipe.float, pipe.bfloat16, lambda: pipe.to(torch.float16), lambda: pipe.to_empty(device="meta")):
        with pytest.raises(ValueError, match=r"stays on its device and in its dtype, cpu and torch\.float64"):
            change()
    with pytest.raises(ValueError, match="shared memory"):
        pipe.share_memory()
    with pytest.raises(NotImplementedError, match="call step, evaluate"):
        pipe(torch.zeros(1))
    visited: list[nn.Module] = []
    pipe.apply(visited.append)
    assert {m for m in visited if isinstance(m, nn.Linear)} == {
        m for stage in pipe.stages.values() for m in stage.modules() if isinstance(m, nn.Linear)
    }


# Hugging Face models


def hugging_face(kind: str, order: str, seed: int = 0) -> Pipeline:
    from terapipe.hf import Decoder
    from terapipe.hf.verify.small_model import small_model
    from tests.support.hf_models import small_config

    decoder = Decoder(small_model(small_config(kind), seed=seed), backend="attention")
    return Pipeline(decoder, plan_for(order, 2), timeout=300.0)


def of_a_hugging_face_model(kind: str, order: str, folder: str) -> tuple[set[str], set[str], bool]:
    """Names of state and buffers, and whether the state goes to another such pipeline."""
    pipe, other = hugging_face(kind, order), hugging_face(kind, order, seed=5)
    held = dict(pipe.named_parameters(remove_duplicate=False))
    assert all(pipe.get_parameter(name) is p for name, p in held.items())
    before = equal(dict(other.state_dict()), dict(pipe.state_dict()))
    dcp.save(get_model_state_dict(pipe), checkpoint_id=folder)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    buffers = {name for name, _ in pipe.named_buffers()}
    assert not any(module.training for module in pipe.eval().modules())
    return set(pipe.state_dict()), buffers, not before and equal(dict(other.state_dict()), dict(pipe.state_dict()))


@pytest.mark.parametrize(("kind", "order"), [("llama", "terapipe"), ("llama", "terapipe-v"), ("gpt2", "interleaved")])
def test_hugging_face_models_have_their_own_names(
    ranks: Callable[[int], Ranks], tmp_path: Path, kind: str, order: str
) -> None:
    from terapipe.hf.verify.small_model import small_model
    from tests.support.hf_models import small_config

    model = small_model(small_config(kind))
    found = ranks(2)(of_a_hugging_face_model, kind, order, str(tmp_path / "saved"))
    assert set.union(*(state for state, _, _ in found)) == set(model.state_dict())
    assert set.union(*(buffers for _, buffers, _ in found)) <= {name for name, _ in model.named_buffers()}
    assert all(loaded for _, _, loaded in found)


# Hooks


def hooked(order: str, layout: Layout, shard: bool) -> dict[str, list[Tensor]]:
    """What hooks saw, by parameter: gradients in full."""
    pipe = pipeline(order, layout, shard)
    rows = make_batch(TINY, layout.dp, 28, ignored=True)
    mine = tuple(x[pipe.dp_rank : pipe.dp_rank + 1] for x in rows)
    seen: dict[str, list[Tensor]] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda p: seen.setdefault(name, []).append(local(p.grad))  # type: ignore[arg-type]

    handles = [p.register_post_accumulate_grad_hook(note(name)) for name, p in pipe.named_parameters()]
    pipe.step(*mine)
    for name, p in pipe.named_parameters():
        assert p.grad is not None
        assert [torch.equal(x, local(p.grad)) for x in seen[name]] == [True], f"{name}: once, and complete"
    pipe.evaluate(*mine)
    pipe.step(*mine)
    assert all(len(found) == 2 for found in seen.values())
    for handle in handles:
        handle.remove()
    pipe.step(*mine)
    assert all(len(found) == 2 for found in seen.values())
    pipe.zero_grad()
    pipe.step(*mine)
    return {name: [whole(p.grad)] for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("order", "layout", "shard"),
    [
        ("terapipe", Layout(1, 2, 1), False),
        ("terapipe-1f1b", Layout(1, 2, 1), False),
        ("terapipe-deferred", Layout(1, 2, 1), False),
        ("terapipe-v", Layout(1, 2, 1), False),
        ("terapipe-zb", Layout(1, 2, 1), False),
        ("terapipe-deferred", Layout(2, 1, 1), False),
        ("terapipe-deferred", Layout(2, 1, 1), True),
        ("terapipe", Layout(1, 1, 2), False),
    ],
    ids=str,
)
def test_hooks_see_each_complete_gradient_once(
    ranks: Callable[[int], Ranks], order: str, layout: Layout, shard: bool
) -> None:
    model = make_model(variant(tied=True))
    ids, labels = make_batch(TINY, layout.dp, 28, ignored=True)
    (model.loss(model(ids), labels) / (labels != IGNORE).sum()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    wanted["head.weight"] = wanted["embedding.weight"]
    for part in ranks(2)(hooked, order, layout, shard):
        for name, (gradient,) in part.items():
            torch.testing.assert_close(gradient, wanted[name])


def test_after_a_failed_step_hooks_are_as_before() -> None:
    pipe = Pipeline(make_model(TINY), plan_for("terapipe", 1))
    seen: list[Tensor] = []
    weight = pipe.get_parameter("layers.0.up.weight")
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    handle = pipe.get_submodule("layers.1").register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        pipe.step(*make_batch(TINY, 1, 28, ignored=True))
    assert not seen
    handle.remove()
    weight.sum().backward()
    assert len(seen) == 1


# torch.distributed.checkpoint


LAYOUTS = [
    ("terapipe", Layout(1, 1, 1), False),
    ("terapipe", Layout(1, 2, 1), False),
    ("terapipe-v", Layout(1, 2, 1), False),
    ("interleaved", Layout(1, 2, 1), False),
    ("terapipe", Layout(2, 1, 1), False),
    ("terapipe", Layout(2, 1, 1), True),
    ("terapipe", Layout(1, 1, 2), False),
]


def round_trip(order: str, layout: Layout, shard: bool, folder: str) -> list[bool]:
    """A trained pipeline's state by torch's functions alone, to another with other weights."""
    pipe = pipeline(order, layout, shard)
    optimizer = adam(pipe)
    train(pipe, optimizer, range(2))
    wanted = snapshot(pipe, optimizer)
    model_state, optimizer_state = get_state_dict(pipe, optimizer, options=FLAT)
    with without_dist_warning():
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    other = pipeline(order, layout, shard, seed=9)
    loaded = adam(other)
    results = [model_state.keys() == pipe.state_dict().keys(), not equal(snapshot(other, loaded), wanted)]
    to_model, to_optimizer = get_state_dict(other, loaded, options=FLAT)
    with without_dist_warning():
        dcp.load({"model": to_model, "optimizer": to_optimizer}, checkpoint_id=folder)
    found = set_state_dict(other, loaded, model_state_dict=to_model, optim_state_dict=to_optimizer, options=FLAT)
    results += [not found.missing_keys and not found.unexpected_keys, equal(snapshot(other, loaded), wanted)]
    train(pipe, optimizer, range(2, 3))
    train(other, loaded, range(2, 3))
    return [*results, equal(snapshot(other, loaded), snapshot(pipe, optimizer))]


@pytest.mark.exhaustive_ids("terapipe-dp 2 x pp 1 x tp 1-False")
@pytest.mark.parametrize(("order", "layout", "shard"), LAYOUTS, ids=str)
def test_torchs_state_dict_functions_round_trip(
    ranks: Callable[[int], Ranks], tmp_path: Path, order: str, layout: Layout, shard: bool
) -> None:
    arguments = (order, layout, shard, str(tmp_path / "saved"))
    results = ranks(layout.devices)(round_trip, *arguments) if layout.devices > 1 else [round_trip(*arguments)]
    assert results == [[True] * 5] * layout.devices


def in_memory(order: str, layout: Layout, shard: bool) -> list[bool]:
    """Model and optimizer by themselves, in torch's nested form."""
    pipe = pipeline(order, layout, shard)
    optimizer = adam(pipe)
    train(pipe, optimizer, range(2))
    other = pipeline(order, layout, shard, seed=9)
    loaded = adam(other)
    set_model_state_dict(other, get_model_state_dict(pipe))
    same_weights = equal(
        {name: local(x) for name, x in other.state_dict().items()},
        {name: local(x) for name, x in pipe.state_dict().items()},
    )
    set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(pipe, optimizer))
    return [same_weights, equal(snapshot(other, loaded), snapshot(pipe, optimizer))]


@pytest.mark.parametrize(("order", "layout", "shard"), [LAYOUTS[2], LAYOUTS[5], LAYOUTS[6]], ids=str)
def test_model_and_optimizer_by_themselves(
    ranks: Callable[[int], Ranks], order: str, layout: Layout, shard: bool
) -> None:
    assert ranks(2)(in_memory, order, layout, shard) == [[True, True]] * 2


def test_full_state_is_the_whole_models(ranks: Callable[[int], Ranks]) -> None:
    truth = make_model(variant(tied=True)).state_dict()
    for part in ranks(2)(full_state, Layout(1, 1, 2)) + ranks(2)(full_state, Layout(2, 1, 1)):
        assert equal(part, dict(truth))


def full_state(layout: Layout) -> dict[str, Any]:
    pipe = pipeline("terapipe", layout, shard=layout.dp > 1)
    return dict(get_model_state_dict(pipe, options=StateDictOptions(full_state_dict=True)))


def test_float32_masters_go_through_torchs_functions() -> None:
    def made(seed: int) -> tuple[Pipeline, MasterAdamW]:
        pipe = Pipeline(GPT(TINY, seed=seed).bfloat16(), plan_for("terapipe", 1))
        return pipe, MasterAdamW(pipe.parameters(), lr=0.01)

    (pipe, optimizer), (other, loaded) = made(3), made(9)
    train(pipe, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(pipe, optimizer)
    set_state_dict(other, loaded, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert equal(snapshot(other, loaded), snapshot(pipe, optimizer))
    assert any("master" in name for name in snapshot(other, loaded))
