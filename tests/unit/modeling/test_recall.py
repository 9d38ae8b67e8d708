"""What light recomputation keeps is learned from a layer's first forward, and is enough whatever the layer does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import terapipe as tp
from terapipe.modeling import recall
from terapipe.modeling.compiling import compile_layers
from terapipe.modeling.slice_cache import current_cache
from terapipe.modeling.stage import SlicedStage
from terapipe.planning.recompute import Recompute
from tests.support.models import TINY, make_model

WIDTH, LENGTHS = 16, (7, 1, 5)


class Layer(nn.Module):
    """An MLP with what a test makes of its first product."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.change = nn.LayerNorm(WIDTH), change
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.change(self.up(self.norm(x))))


class Layers(tp.Stage):
    hidden_size = WIDTH

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, cache: tp.SliceCache) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stage_of(*changes: Callable[[Tensor], Tensor]) -> Layers:
    torch.manual_seed(0)
    return Layers(*map(Layer, changes)).double()


def gradients(sliced: SlicedStage, mode: Recompute) -> dict[str, Tensor]:
    """Of all weights that are trained and of the input, of slices whose backwards follow in reverse."""
    stage = sliced.stage
    stage.zero_grad()
    torch.manual_seed(1)
    whole = torch.randn(2, sum(LENGTHS), WIDTH, dtype=torch.float64)
    cache, start, slices = stage.make_cache(2, sum(LENGTHS)), 0, []
    for x in whole.split(LENGTHS, 1):
        x = x.clone().requires_grad_()
        cache.begin(start, x.shape[1])
        slices.append((start, x, sliced.forward(x, cache, recompute=mode)))
        start += x.shape[1]
    for start, x, out in reversed(slices):
        cache.begin(start, x.shape[1])
        sliced.backward(cache, out, out.detach().cos())
    inputs = torch.cat([x.grad for _, x, _ in slices if x.grad is not None], 1)
    return {name: p.grad for name, p in stage.named_parameters() if p.grad is not None} | {"x": inputs}


def same(stage: tp.Stage) -> SlicedStage:
    """Compares with a stage that keeps everything, twice: when needs are learned, and when they are known."""
    sliced = SlicedStage(stage)
    wanted = {name: grad.clone() for name, grad in gradients(sliced, "none").items()}
    for _ in range(2):
        light = gradients(sliced, "light")
        assert wanted.keys() == light.keys()
        assert all(torch.equal(grad, light[name]) for name, grad in wanted.items())
    return sliced


def changed(x: Tensor) -> Tensor:
    return F.gelu(x.mul_(2))


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3  # saves nothing of x, but reads it


def picking(x: Tensor) -> Tensor:
    return x * (x[..., :1] > 0)


def written(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    with torch.no_grad():
        out.copy_(x.sigmoid())
    return out * x


def dropped(x: Tensor) -> Tensor:
    return F.dropout(F.relu(x), 0.5)


@pytest.mark.parametrize("change", [F.gelu, F.silu, changed, branching, picking, written, dropped])
def test_gradients_are_the_same_to_the_bit(change: Callable[[Tensor], Tensor]) -> None:
    same(stage_of(change, change))


def needs_of(sliced: SlicedStage) -> tuple[set[str], set[str]]:
    """Names of products that are not needed, and of those that are changed in place."""
    names = {id(p): name for name, p in sliced.stage.named_parameters()}
    needs = list(sliced._needs.values())
    spared, changed = ({key for each in needs for key, _ in getattr(each, kind)} for kind in ("spared", "changed"))
    return {names[key] for key in spared}, {names[key] for key in changed}


def test_what_nothing_is_computed_from_is_not_kept() -> None:
    assert needs_of(same(stage_of(F.gelu))) == ({"layers.0.down.weight"}, set())
    assert needs_of(same(stage_of(changed))) == ({"layers.0.down.weight"}, {"layers.0.up.weight"})
    sliced = same(stage_of(lambda x: x * 2))  # a weight's gradient is made of it
    assert needs_of(sliced) == ({"layers.0.down.weight"}, set())
    frozen = stage_of(lambda x: x * 2)
    frozen.layers[0].down.requires_grad_(False)  # type: ignore[union-attr]
    assert needs_of(same(frozen)) == ({"layers.0.down.weight", "layers.0.up.weight"}, set())


def test_needs_are_learned_anew_when_something_else_is_trained() -> None:
    stage = stage_of(lambda x: x * 2)
    down: Any = stage.layers[0].down  # type: ignore[union-attr]
    down.requires_grad_(False)
    sliced = same(stage)
    down.requires_grad_(True)
    wanted = {name: grad.clone() for name, grad in gradients(sliced, "none").items()}
    light = gradients(sliced, "light")
    assert all(torch.equal(grad, light[name]) for name, grad in wanted.items())


def test_what_was_taken_for_needless_gives_no_number() -> None:
    """Not a wrong gradient, that is: here a layer saves something only in its second slice, of which nobody told."""

    def whimsical(x: Tensor) -> Tensor:
        cache = current_cache()
        assert cache is not None
        return F.gelu(x) if cache.context == 8 else x * 2

    stage = stage_of(whimsical)
    stage.layers[0].down.requires_grad_(False)  # type: ignore[union-attr]
    assert gradients(SlicedStage(stage), "light")["x"].isnan().any()


def test_an_adapters_second_product_is_computed_again() -> None:
    """Its input is so much smaller than its output, which only adds to that of the frozen weight."""
    stage = stage_of(F.gelu)
    layer: Any = stage.layers[0]
    layer.up.requires_grad_(False)
    layer.first, layer.second = nn.Linear(WIDTH, 2).double(), nn.Linear(2, 4 * WIDTH).double()
    layer.change = lambda x: F.gelu(x + layer.second(layer.first(x[..., :WIDTH])))
    sliced = same(stage)
    counted = {key for each in sliced._needs.values() for key, _ in each.spared | each.changed}
    assert id(layer.second.weight) not in counted
    assert recall.NARROW * 2 <= 4 * WIDTH


class Checkpointed(Layer):
    """One that computes itself again, by torch's own checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("frozen", [(), ("up",), ("down",), ("up", "down")])
def test_a_layer_may_have_a_checkpoint_of_its_own(frozen: tuple[str, ...]) -> None:
    """What it computes again comes after the layer's second forward. Frozen products were plain ones there, which save
    other tensors, and torch stopped with a CheckpointError."""
    torch.manual_seed(0)
    stage = Layers(Checkpointed(F.gelu), Checkpointed(F.silu)).double()
    for layer in stage.layers:
        for name in frozen:
            layer.get_submodule(name).requires_grad_(False)
    same(stage)


def test_what_cannot_be_recalled_is_refused() -> None:
    plan = tp.Plan((1,), ((9, 7),), (0, 4), recompute="light")
    with pytest.raises(ValueError, match="fused_weight_grads=False; leave that out"):
        tp.Pipeline(make_model(TINY), plan, device="cpu", fused_weight_grads=False)
    stage = make_model(TINY).stage(0, 4, torch.device("cpu"))
    compile_layers(stage, backend="eager")
    cache = stage.make_cache(1, 16)
    cache.begin(0, 9)
    with pytest.raises(ValueError, match="cannot look into compiled layers"):
        SlicedStage(stage).forward(torch.zeros(1, 9, dtype=torch.int64), cache, recompute="light")
