"""What outlives a slice: keys and values, states, and the places of its tokens."""

import torch

from terapipe.modeling.key_values import KeyValueStore
from terapipe.modeling.slice_cache import SliceCache, longest_document


def test_keys_and_values_are_written_at_their_place() -> None:
    store, x = KeyValueStore(), torch.randn(2, 3, 8, 4)
    store.write(x[:, :, :5], -x[:, :, :5], 0, 8)
    store.write(x[:, :, 5:], -x[:, :, 5:], 5, 8)
    keys, values = store.read(slice(None), slice(2, 7))
    assert torch.equal(keys, x[:, :, 2:7])
    assert torch.equal(values, -keys)


def test_gradients_of_half_precision_are_summed_in_float32() -> None:
    store, x = KeyValueStore(), torch.ones(1, 1, 4, 2, dtype=torch.bfloat16)
    store.write(x, x, 0, 4)
    tiny = torch.full_like(x, 2**-10)  # vanishes when added to 1 in bfloat16
    store.add_grad(x, x, slice(None), slice(0, 4), overwrite=True)
    store.add_grad(tiny, tiny, slice(None), slice(0, 4), overwrite=False)
    dk, _ = store.grad(1, 3)
    assert dk.dtype == torch.float32
    assert torch.equal(dk, torch.full((1, 1, 2, 2), 1 + 2**-10))


def test_gradients_of_states_come_back_to_the_slice_that_left_them() -> None:
    """h1 = a x1, h2 = h1 + a x2: the slice before gets d h2 / d h1 through the cache, not through one graph."""
    cache, a = SliceCache(4), torch.tensor(2.0, requires_grad=True)
    outs = []
    for start, x in ((0, 3.0), (2, 5.0)):
        cache.begin(start, 2)
        before = cache.get_state("h")
        outs.append(a * x + (0.0 if before is None else before))
        cache.set_state("h", outs[-1])
    for start, out in ((2, outs[1]), (0, outs[0])):
        cache.begin(start, 2)
        cache.backward(out, torch.tensor(1.0))
    assert a.grad == (3.0 + 5.0) + 3.0
    cache.clear()
    assert cache.get_state("h") is None


def test_positions_begin_anew_with_each_document() -> None:
    cache = SliceCache(6)
    cache.begin(2, 3)
    assert cache.positions(torch.device("cpu")).tolist() == [[2, 3, 4]]
    cache.set_documents([[0, 3], [0]])
    assert cache.positions(torch.device("cpu")).tolist() == [[2, 0, 1], [2, 3, 4]]
    assert cache.longest == longest_document([[0, 3], [0]], 6) == 6
