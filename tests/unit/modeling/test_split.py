"""A stage whose operators are shared by two devices: how it is built, and what it keeps."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from terapipe import GPT, GPTConfig
from terapipe.modeling.stage import TensorParallel
from terapipe.modeling.weight_grads import to_local
from tests.support.models import variant
from tests.support.ranks import Ranks

CONFIG = variant(kv_heads=2, tied=True)
CPU = torch.device("cpu")


def split_stage(model: GPT, first: int, last: int, tokens: bool = False) -> GPT:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    return model.stage(first, last, CPU, TensorParallel(mesh, tokens))


def built_twice() -> tuple[bool, bool, int, int]:
    with torch.device("meta"):
        unmade = GPT(CONFIG, seed=5)
    from_meta, from_real = split_stage(unmade, 0, 4), split_stage(GPT(CONFIG, seed=5), 0, 4)
    pairs = list(zip(from_meta.named_parameters(), from_real.named_parameters(), strict=True))
    same = all(a == b and torch.equal(to_local(p), to_local(q)) for (a, p), (b, q) in pairs)
    split = all(isinstance(p, DTensor) for p in from_meta.parameters())
    return same, split, sum(to_local(p).numel() for p in from_meta.parameters()), sum(p.numel() for _, (_, p) in pairs)


def test_a_split_stage_is_the_same_from_meta_and_holds_about_half(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(2)(built_twice)
    for same, all_in_parts, held, whole in answers:
        assert same
        assert all_in_parts
        assert held < 0.65 * whole  # positions and norms are whole on both
    assert sum(held for _, _, held, _ in answers) < 1.25 * answers[0][3]


def kept(tokens: bool) -> tuple[int, tuple[int, ...]]:
    """Bytes that a forward saves for its backward, parameters aside, and the shape that is sent on."""
    config = GPTConfig(layers=2, hidden=64, heads=4, vocab=32, max_seq_len=64)
    stage = split_stage(GPT(config), 1, 2, tokens)
    cache = stage.make_cache(1, 64)
    cache.begin(0, 64)
    held = {to_local(p).data_ptr() for p in stage.parameters()}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        part = to_local(x)
        if part.data_ptr() not in held:
            saved[part.data_ptr()] = part.untyped_storage().nbytes()
        return x

    shape = stage.hidden_shape(1, 64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = stage(torch.randn(shape, requires_grad=True), cache)
    assert out.shape == shape
    return sum(saved.values()), shape


def test_tokens_shared_out_save_and_send_less(ranks: Callable[[int], Ranks]) -> None:
    whole, shared = ranks(2)(kept, False)[0], ranks(2)(kept, True)[0]
    assert whole[1] == (1, 64, 64)
    assert shared[1] == (1, 32, 64)
    assert shared[0] < 0.9 * whole[0]
