"""Kernels that the host starts for a layer of a slice, in half precision: hardly more than for a plain model."""

import pytest
import torch

from benchmarks.host_time.measure import of_layer_and_action, of_plain_layer_and_action, plain_llama, sliced_llama
from terapipe.modeling.weight_grads import can_add_in_float32


def test_kernels_of_a_layer_and_slice() -> None:
    """They were 24 more: sums of weights' gradients in float32, one by one for norms; copies of queries and outputs;
    and gradients of keys and values, which later slices add to."""
    if not can_add_in_float32(torch.bfloat16):
        pytest.skip("this device does not multiply half precision and add to a sum in float32, in one operation")
    (mine, _), (plain, _) = of_layer_and_action(sliced_llama, 0), of_plain_layer_and_action(plain_llama, 0)
    assert mine.kernels <= plain.kernels + 5
