"""A model that computes next to nothing: what a step of it takes is the executor's own."""

import torch
from torch import Tensor, nn

from terapipe import SliceCache


class IdleStage(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self._is_first = layer == 0
        self.register_parameter(f"layer{layer}", nn.Parameter(torch.ones(1)))

    def make_cache(self, size: int, seq_len: int) -> SliceCache:
        return SliceCache(seq_len)

    def forward(self, x: Tensor, cache: SliceCache) -> Tensor:
        return (x[..., None].float() if self._is_first else x) * next(self.parameters())

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return hidden.sum()

    def hidden_shape(self, size: int, length: int) -> tuple[int, ...]:
        return size, length, 1

    @property
    def blocks(self) -> list[nn.Module]:
        return []


class Idle(nn.Module):
    """As many layers as asked for, one for each stage."""

    tied: tuple[str, ...] = ()

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.num_layers = num_layers

    def stage(self, first: int, last: int, device: torch.device) -> nn.Module:
        return IdleStage(first)
