"""What a forward saves leaves the device and comes back as it was."""

import gc
import time
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terapipe.modeling.offload import (
    ALIGN,
    UNIT,
    Copier,
    HostMemory,
    SavedTensors,
    stand_in_for_input,
    stand_in_for_output,
    storages_of,
)

CPU = torch.device("cpu")


def saved_tensors() -> SavedTensors:
    return SavedTensors(Copier(CPU), CPU, time.perf_counter)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)).double()


def plain(layers: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    layers(x).square().sum().backward()
    return [x.grad, *(p.grad for p in layers.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_the_same_to_the_bit_and_memory_is_free_meanwhile(checkpointed: bool) -> None:
    layers, x = model(), torch.randn(50, 64, dtype=torch.float64)
    wanted = plain(layers, x)
    layers.zero_grad()
    saved, alive = saved_tensors(), []
    leaf, inner = stand_in_for_input(x.clone())
    hook = layers[2].register_forward_hook(lambda _, __, out: alive.append(weakref.ref(out.untyped_storage())))
    with saved.hooks():
        out = checkpoint(layers, inner, use_reentrant=False) if checkpointed else layers(inner)
    hook.remove()
    end = stand_in_for_output(out)
    gradient = 2 * out.detach()
    alive.append(weakref.ref(out.untyped_storage()))
    del out, inner
    saved.start_out(storages_of([layers]))
    saved.finish_out()
    gc.collect()
    assert all(storage() is None for storage in alive), "somebody still holds it"
    assert saved.nbytes >= (50 * 64 * 8 if checkpointed else 50 * (64 + 128) * 8)
    saved.start_back()
    saved.finish_back()
    end.backward(gradient)
    assert all(
        torch.equal(a, b) for a, b in zip(wanted, [leaf.grad, *(p.grad for p in layers.parameters())], strict=True)
    )


def test_stand_ins_have_no_memory() -> None:
    x = torch.randn(100, 100)
    leaf, inner = stand_in_for_input(x)
    assert leaf.shape == x.shape
    assert leaf.untyped_storage().nbytes() == 4
    assert inner.data_ptr() == x.data_ptr()
    end = stand_in_for_output(inner * 2)
    assert end.untyped_storage().nbytes() == 4
    end.backward(torch.ones(100, 100))
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((100, 100), 2.0))


def test_weights_views_and_small_tensors() -> None:
    """A storage moves once, whatever has views of it; weights, scalars and corners of larger storages stay."""
    saved, weight = saved_tensors(), nn.Linear(64, 64)
    whole = torch.randn(64, 64)
    views = [saved.pack(view) for view in (whole[:32], whole[16:], whole.t(), whole[:32])]
    corner = torch.randn(1000, 64)
    kept = saved.pack(corner[:10])
    small = torch.ones(3)
    assert saved.pack(small) is small
    own = saved.pack(weight.weight.detach())
    saved.start_out(storages_of([weight]))
    assert saved.nbytes == -(-64 * 64 * 4 // ALIGN) * ALIGN
    saved.finish_out()
    saved.start_back()
    saved.finish_back()
    for packed, view in zip(views, (whole[:32], whole[16:], whole.t(), whole[:32]), strict=True):
        back = saved.unpack(packed)
        assert torch.equal(back, view)
        assert back.stride() == view.stride()
    assert saved.unpack(views[0]).untyped_storage().data_ptr() == saved.unpack(views[1]).untyped_storage().data_ptr()
    assert saved.unpack(kept).data_ptr() == corner.data_ptr()
    assert saved.unpack(own).data_ptr() == weight.weight.data_ptr()


def test_what_is_changed_after_it_was_saved_is_refused() -> None:
    """Autograd would notice, but not where hooks keep what it saved."""
    saved, x = saved_tensors(), torch.randn(64, 64, requires_grad=True)
    with saved.hooks():
        y = (x * 2).exp()
        y.add_(1)
    saved.start_out(set())
    with pytest.raises(RuntimeError, match=r"changed in place after it was saved, of shape \(64, 64\)"):
        saved.finish_out()


def test_memory_of_the_host_is_put_together_from_powers_of_two_and_used_again() -> None:
    host = HostMemory(CPU)
    room = host.take(5 * UNIT + 3)
    assert [len(piece) // UNIT for piece in room.pieces] == [4, 2]
    flat = torch.arange(5 * UNIT + 3, dtype=torch.int64).to(torch.uint8)
    for part, place in room.parts(0, flat):
        place.copy_(part)
    middle = torch.empty(2 * UNIT, dtype=torch.uint8)
    for part, place in room.parts(3 * UNIT, middle):
        part.copy_(place)
    assert torch.equal(middle, flat[3 * UNIT : 5 * UNIT])
    host.give_back(room)
    again = host.take(6 * UNIT)
    assert host.nbytes == 6 * UNIT, "nothing new"
    assert {piece.data_ptr() for piece in again.pieces} == {piece.data_ptr() for piece in room.pieces}
    assert host.take(0).pieces == []
