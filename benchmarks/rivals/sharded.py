"""What people use instead of pipelines: FSDP2, with each sequence over the ranks or some sequences for each, and tensor
parallelism."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rivals.contest import CONFIG, Case, Contestant
from benchmarks.step.measure import cross_entropy
from terapipe import GPT


class Decoder(nn.Module):
    """The plain model from tokens and their places to the loss, for wrappers that want to be called."""

    def __init__(self) -> None:
        super().__init__()
        gpt: Any = GPT(CONFIG)
        self.embedding, self.positions, self.layers = gpt.embedding, gpt.positions, gpt.layers
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, ids: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(ids) + self.positions(places)
        for block in self.layers.values():
            hidden = block(hidden, None)
        return cross_entropy(self.head(self.norm(hidden)), labels)


class Exchange(torch.autograd.Function):
    """Cuts one dimension into a part for each rank, and joins what the ranks sent along another. Its backward is the
    same the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int) -> Tensor:
        ctx.dims = cut, join
        sent = torch.stack(x.chunk(dist.get_world_size(), cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cut, join = ctx.dims
        out: Tensor = Exchange.apply(gradients[0], join, cut)
        return out, None, None


class UlyssesAttention(nn.Module):
    """Attention of a rank's tokens: all tokens of some heads come here, and go back. Queries, keys and values of a
    head lie together in the plain model's projection, so one exchange carries all three."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.size = attention.qkv, attention.out, attention.head_size

    def forward(self, x: Tensor, cache: None) -> Tensor:
        heads = self.qkv(x).unflatten(2, (-1, 3 * self.size))
        q, k, v = Exchange.apply(heads, 2, 1).transpose(1, 2).chunk(3, 3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        out: Tensor = self.out(Exchange.apply(mixed, 1, 2).flatten(2))
        return out


def ulysses_decoder() -> Decoder:
    decoder = Decoder()
    for block in decoder.layers.values():
        block.attention = UlyssesAttention(block.attention)
    return decoder


def fully_sharded(decoder: Decoder, checkpointing: bool = False) -> Decoder:
    """FSDP2 over all ranks, layer by layer, as its manual says.

    Args:
        decoder: The plain one, or one whose attention exchanges tokens.
        checkpointing: Whether each layer computes its activations again in the backward.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, block in decoder.layers.items():
        if checkpointing:
            decoder.layers[name] = block = checkpoint_wrapper(block)
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    return decoder


def places_of(case: Case) -> Tensor:
    return torch.arange(case.tokens).expand(case.sequences, -1)


def stepping(module: nn.Module, *batch: Tensor) -> Contestant:
    """A step of a module that returns the loss."""
    contestant = Contestant(module)
    contestant.backward = lambda: module(*batch).backward()
    return contestant


def part_of(case: Case, dim: int) -> tuple[Tensor, ...]:
    """This rank's sequences (0) or tokens of each (1)."""
    whole = (case.ids, places_of(case), case.labels)
    return tuple(x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous() for x in whole)


def ulysses(case: Case) -> Contestant:
    """Each sequence over the ranks, weights on every rank, gradients summed by DDP."""
    return stepping(DistributedDataParallel(ulysses_decoder(), gradient_as_bucket_view=True), *part_of(case, 1))


def fsdp_ulysses(case: Case) -> Contestant:
    return stepping(fully_sharded(ulysses_decoder()), *part_of(case, 1))


def fsdp(case: Case) -> Contestant:
    return stepping(fully_sharded(Decoder()), *part_of(case, 0))


def fsdp_checkpointing(case: Case) -> Contestant:
    return stepping(fully_sharded(Decoder(), checkpointing=True), *part_of(case, 0))


def fsdp_context_parallel(case: Case) -> Contestant:
    """torch's own ring attention, which takes the place of ``scaled_dot_product_attention``."""
    decoder = fully_sharded(Decoder())
    contestant = Contestant(decoder)

    def backward() -> None:
        batch = [x.clone() for x in (case.ids, places_of(case), case.labels)]  # they are cut in place
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        with context_parallel(mesh, buffers=batch, buffer_seq_dims=[1, 1, 1]):
            decoder(*batch).backward()

    contestant.backward = backward
    return contestant


def tensor_parallel(case: Case) -> Contestant:
    """Attention by heads and the feed-forward by its width; what little else there is on every rank."""
    decoder = Decoder()
    styles = {"attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel()}
    styles |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in decoder.layers.values():
        parallelize_module(block, mesh, dict(styles))
    return stepping(decoder, case.ids, places_of(case), case.labels)
