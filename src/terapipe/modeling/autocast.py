"""What ``torch.autocast`` does with the inputs of matrix products and attention, for those that torch does not know."""

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast, where it is on, computes such a product in. None where it leaves the tensor as it is:
    float64 is never cast."""
    device = x.device.type
    if x.dtype is torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocasted(x: Tensor) -> Tensor:
    """In that dtype. Its gradient is cast back."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)
