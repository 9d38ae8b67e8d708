"""The count of bytes against what a real stage saves."""

import pytest
import torch

from terapipe import GPT, GPTConfig
from terapipe.planning.cost import StageSpec, stage_specs
from terapipe.planning.memory import ShapeMemory, parameters

CONFIG = GPTConfig(layers=3, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=50, max_seq_len=256)


def saved_bytes(stage: GPT, x: torch.Tensor, context: int) -> int:
    """Of all storages that autograd holds after a slice's forward, parameters and keys and values left out."""
    cache = stage.make_cache(len(x), 256)
    cache.begin(0, context)
    stage(torch.randn(len(x), context, CONFIG.hidden), cache)
    held: dict[int, int] = {}
    ignored = {p.untyped_storage().data_ptr() for p in stage.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    cache.begin(context, x.shape[1])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = stage(x, cache)
    held[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
    return sum(held.values())


@pytest.mark.parametrize(("size", "length"), [(1, 128), (2, 60)])
def test_what_a_stage_keeps(size: int, length: int) -> None:
    stage = GPT(CONFIG).stage(1, 3, torch.device("cpu"))
    found = saved_bytes(stage, torch.randn(size, length, CONFIG.hidden).requires_grad_(), 64)
    counted = ShapeMemory(CONFIG).activations(StageSpec(2), size, length)
    assert found == pytest.approx(float(counted), rel=0.02)


def test_keys_values_and_their_gradients() -> None:
    stage = GPT(CONFIG).stage(1, 3, torch.device("cpu"))
    cache = stage.make_cache(2, 256)
    for context in (0, 128):
        cache.begin(context, 128)
        out = stage(torch.randn(2, 128, CONFIG.hidden), cache)
    out.sum().backward()
    stores = [cache.store(layer) for layer in (1, 2)]
    found = sum(t.nbytes for store in stores for t in store._tensors.values())
    assert found == ShapeMemory(CONFIG).kv_cache(StageSpec(2), 2, 256)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_all_counted(tied: bool) -> None:
    config = GPTConfig(layers=4, hidden=64, heads=4, vocab=50, max_seq_len=32, tied=tied)
    model = GPT(config)
    assert parameters(config, stage_specs((0, 4))) == sum(p.numel() for p in model.parameters())
    for part, (first, last) in zip(stage_specs((0, 1, 3, 4)), ((0, 1), (1, 3), (3, 4)), strict=True):
        stage = model.stage(first, last, torch.device("cpu"))
        assert parameters(config, [part]) == sum(p.numel() for p in stage.parameters())
        assert ShapeMemory(config).model_state(part) == 12 * parameters(config, [part])


def test_recomputation_keeps_only_the_ends() -> None:
    plain, again = ShapeMemory(CONFIG), ShapeMemory(CONFIG, recompute="full")
    part = StageSpec(2)
    assert float(again.activations(part, 1, 100)) == 2 * 100 * 64 * 4
    kept_by_layers = plain.activations(part, 1, 100) - 100 * 64 * 4
    assert again.workspace(part, 1, 100)[1] == pytest.approx(float(kept_by_layers))
    assert plain.workspace(part, 1, 100)[1] == 0


def test_tensor_parallelism_divides() -> None:
    one, four = ShapeMemory(CONFIG), ShapeMemory(CONFIG, tp=4)
    assert four.model_state(StageSpec(2)) == one.model_state(StageSpec(2)) / 4
    assert four.kv_cache(StageSpec(2), 1, 256) == one.kv_cache(StageSpec(2), 1, 256) / 4
    assert (
        one.activations(StageSpec(2), 1, 64) / 4
        < four.activations(StageSpec(2), 1, 64)
        < one.activations(StageSpec(2), 1, 64)
    )
