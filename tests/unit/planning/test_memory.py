"""The count of bytes against what a real stage saves."""

from dataclasses import replace

import pytest
import torch

from terapipe import GPT, GPTConfig, Pipeline, Plan, next_token_labels
from terapipe.planning.cost import StageSpec, stage_specs
from terapipe.planning.device import blas_workspaces
from terapipe.planning.memory import ShapeMemory, parameters
from terapipe.planning.presets import FrozenLayers
from terapipe.runtime import MemoryCounter
from terapipe.scheduling.footprint import peaks
from terapipe.scheduling.simulator import program

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
    wide = replace(CONFIG, head_dim=40)
    saved = saved_bytes(GPT(wide).stage(1, 3, torch.device("cpu")), torch.randn(size, length, 64).requires_grad_(), 64)
    assert saved == pytest.approx(float(ShapeMemory(wide).activations(StageSpec(2), size, length)), rel=0.02)


def test_keys_values_and_their_gradients() -> None:
    stage = GPT(CONFIG).stage(1, 3, torch.device("cpu"))
    cache = stage.make_cache(2, 256)
    for context in (0, 128):
        cache.begin(context, 128)
        out = stage(torch.randn(2, 128, CONFIG.hidden), cache)
    out.sum().backward()
    stores = [cache.store(layer) for layer in (1, 2)]
    held = [t for store in stores for t in vars(store).values() if isinstance(t, torch.Tensor)]
    memory, stage_of_two = ShapeMemory(CONFIG), StageSpec(2)
    wanted = memory.kv_cache(stage_of_two, 2, 256) + memory.kv_gradients(stage_of_two, 2, 256)
    assert sum(t.nbytes for t in held) == wanted


@pytest.mark.parametrize("windows", [(17, 0, 33), (33, 33, 33), (300, 300, 300), (1, 1, 1), (0, 0, 0)])
def test_gradients_of_keys_that_windows_see(windows: tuple[int, ...]) -> None:
    """The planner counts the stage that takes most of any with so many layers: here the last two, or all alike."""
    config = replace(CONFIG, windows=windows)
    stage = GPT(config).stage(1, 3, torch.device("cpu"))
    cache, starts = stage.make_cache(2, 256), range(0, 256, 32)
    outs = []
    for start in starts:
        cache.begin(start, 32)
        outs.append(stage(torch.randn(2, 32, CONFIG.hidden, requires_grad=True), cache))
    for start, out in reversed(list(zip(starts, outs, strict=True))):
        cache.begin(start, 32)
        cache.backward(out, torch.ones_like(out))
    cache.clear()
    held = sum(t.nbytes for free in cache.gradient_room._free.values() for t in free)
    assert held == ShapeMemory(config).kv_gradients(StageSpec(2), 2, 256)


@pytest.mark.parametrize(("tied", "head_dim"), [(True, None), (False, None), (False, 48)])
def test_parameters_are_all_counted(tied: bool, head_dim: int | None) -> None:
    config = GPTConfig(layers=4, hidden=64, heads=4, vocab=50, max_seq_len=32, tied=tied, head_dim=head_dim)
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
    both = [memory.workspace(part, 1, 100, 50)[1] for memory in (again, plain)]
    assert both[0] - both[1] == pytest.approx(float(kept_by_layers))


def test_tensor_parallelism_divides() -> None:
    one, four = ShapeMemory(CONFIG), ShapeMemory(CONFIG, tp=4)
    whole = 2 * 6 * 64 * 12  # norms, and biases of sums over devices: weight and state
    assert four.model_state(StageSpec(2)) == (one.model_state(StageSpec(2)) - whole) / 4 + whole
    assert four.kv_cache(StageSpec(2), 1, 256) == one.kv_cache(StageSpec(2), 1, 256) / 4
    assert four.activations(StageSpec(2), 1, 64) == one.activations(StageSpec(2), 1, 64) / 4


def test_flash_attention_needs_all_query_heads_of_the_context() -> None:
    """64 heads, 8 of keys, of 128, behind 128k tokens: 4.8 GB of dK and dV that nobody counted."""
    config = GPTConfig(layers=1, hidden=8192, heads=64, kv_heads=8, ffn=8192)
    element, keys = 2, 131072
    mlp = (1 + 1 + 2 - 3) * 1024 * 8192 * element  # that is gone by then, less gradients
    shared, expanded = 2 * keys * 8 * 128 * element, 2 * keys * 64 * 128 * element
    sums = 1024 * 8192 * 4  # of the queries' gradients, in float32

    def needed(kernel: str, config: GPTConfig = config, tp: int = 1) -> float:
        memory = ShapeMemory(config, element, attention=kernel, tp=tp)
        return float(memory.workspace(StageSpec(4), 1, 1024, keys - 1024)[1]) + (mlp if tp == 1 else 0)

    assert needed("flash") == needed("flash-attn") == shared + expanded + sums
    assert needed("flash", tp=8) == pytest.approx(needed("flash") / 8, rel=0.03)
    assert needed("flash", GPTConfig(layers=1, hidden=8192, heads=64, ffn=8192)) == expanded + sums
    assert needed("memory-efficient") == shared + expanded
    assert needed("flex") == needed("flash for CPUs") == shared
    assert needed("plain") == 20 * 512 * 1024 * 64, "in blocks, whatever the context"


def test_cublas_counts_once_for_a_rank() -> None:
    plan = Plan((1,), ((64, 64),), (0, 1, 2, 3, 4), "interleaved", 2)
    without, with_it = (
        peaks(program(plan), plan, ShapeMemory(GPTConfig(4, 64, 4), blas=blas)) for blas in (0, blas_workspaces(9))
    )
    assert [b - a for a, b in zip(without, with_it, strict=True)] == [96 << 20] * 2
    assert blas_workspaces(8) < blas_workspaces(9)


@pytest.mark.parametrize("recompute", ["none", "light", "block", "full"])
def test_a_step_under_autocast(recompute: str) -> None:
    """Copies of all weights were counted nowhere, and keys and values as if they were float32."""
    config = GPTConfig(layers=6, hidden=256, heads=4, kv_heads=2, vocab=100, max_seq_len=256)
    plan = Plan((1,), ((64,) * 4,), (0, 6), recompute=recompute)  # type: ignore[arg-type]
    pipe = Pipeline(GPT(config), plan, device="cpu")
    ids = torch.zeros(1, 256, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(ids, next_token_labels(ids))
        pipe.zero_grad()
        with MemoryCounter(torch.device("cpu")) as counter:
            counter.count(pipe)
            pipe.step(ids, next_token_labels(ids))
    memory = ShapeMemory(config, 2, 0, autocast=True)
    (predicted,) = peaks(program(plan), plan, memory)
    weights = sum(p.numel() for p in pipe.parameters())
    assert memory.model_state(StageSpec(6, True, True)) == pytest.approx(6 * weights, rel=0.05)
    assert counter.peak == pytest.approx(predicted, rel=0.06)


def test_what_cannot_be_deferred_is_not_kept() -> None:
    """In compiled layers of Hugging Face models, weight gradients come with the backward."""
    stage = StageSpec(2)
    assert ShapeMemory(CONFIG).deferred_grads(stage, 1, 64) > 0
    assert ShapeMemory(CONFIG, fused=False).deferred_grads(stage, 1, 64) == 0


def test_frozen_layers_have_no_gradients_and_no_optimizer_state() -> None:
    """A layer in 4 bits with adapters: its bytes, and gradients and state of what is trained."""
    config = GPTConfig(4, 64, 4, vocab=100)
    whole, stage = ShapeMemory(config, 2, 12), StageSpec(4)
    frozen = ShapeMemory(config, 2, 12, frozen=FrozenLayers(layer_bytes=1000.0, trained=10.0, quantized=True))
    assert frozen.model_state(stage) == 4 * (1000 + 10 * (4 + 12))
    assert frozen.gradients(stage).during == 4 * 10 * 4
    first = StageSpec(0, first=True)
    assert frozen.model_state(first) == pytest.approx(whole.model_state(first) * 2 / 14), "frozen, so without state"
