"""The GPT family of the paper: a plain model, and the same modules taken apart into stages.

It is the example of how a model becomes a ``PipelineModel``: what is not plain PyTorch is the call of ``attend``, the
positions from the cache, and ``stage``::

    GPT, all layers        embedding  positions  layers 0 .. 11  norm  head
    stage(0, 4)            embedding  positions  layers 0 .. 3
    stage(4, 8)                                  layers 4 .. 7
    stage(8, 12)                                 layers 8 .. 11  norm  head

A stage is a GPT itself, with None for what it leaves out, and shares the modules of the whole one.
"""

import copy
import hashlib
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from terapipe.modeling.attention import attend
from terapipe.modeling.linear import gathers_input, plain_class
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import PipelineModel, Stage, TensorParallel
from terapipe.modeling.weight_grads import to_local
from terapipe.planning.presets import PRESETS, GPTConfig, ModelSpec


class _GatheringColwise(ColwiseParallel):
    """As ColwiseParallel for an input of which each device has some tokens. Inside of a slice it leaves gathering them
    to the layer, which saves only this device's for its backward: see ``linear.project``."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        if gathers_input(mod):
            return DTensor.from_local(inputs[0], device_mesh, input_layouts, run_check=False)
        prepare: Any = ColwiseParallel._prepare_input_fn
        return prepare(input_layouts, desired_input_layouts, mod, inputs, device_mesh)


class _Replicated(ParallelStyle):
    """A module that every device computes in full; its output is then cut, if asked, at no cost.

    Its parameters become DTensors nevertheless: an optimizer that works on many tensors at once takes no mixture.

    Args:
        output: How the output is laid out over devices; by default every device keeps all of it.
    """

    def __init__(self, output: Placement | None = None) -> None:
        super().__init__()
        self.output = output or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._wrap, self._unwrap)  # type: ignore[arg-type]

    @staticmethod
    def _wrap(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

    def _unwrap(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=[self.output]).to_local()


class Attention(nn.Module):
    """Causal self-attention, with as many heads of keys and values as of queries, or fewer.

    The fused projection holds, for each head of keys and values, its queries, its keys and its values::

        qkv    [ q q q k v | q q q k v | ... ]        one group for each head of keys; here three queries share it

    Cut anywhere between such groups, each part is a smaller attention of its own. So tensor parallelism splits it by
    columns as it is, and no device needs weights of another.

    Args:
        config: Shape of the model.
        layer: The layer's number in the whole model, which is its name in the cache.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_size, self.window = layer, config.head_size, config.window_of(layer)
        self.shared = config.heads // config.num_kv_heads  # queries to each head of keys and values
        self.qkv = nn.Linear(config.hidden, (config.heads + 2 * config.num_kv_heads) * config.head_size)
        self.out = nn.Linear(config.attention_width, config.hidden)

    def forward(self, x: Tensor, cache: SliceCache | None) -> Tensor:
        """Attention of the slice to itself and to earlier slices, or without a cache of whole sequences to themselves.

        Args:
            x: (sequences, tokens, hidden).
            cache: What earlier slices left; None for the plain model.
        """
        projected = self.qkv(x)
        groups = projected.view(*projected.shape[:2], -1, self.shared + 2, self.head_size)
        q, k, v = torch.split(groups, [self.shared, 1, 1], dim=3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        if cache is None:
            mask = None if self.window is None else _window_mask(x.shape[1], self.window, x.device)
            mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.shared > 1)
        else:
            mixed = attend(q, k, v, cache, self.layer, window=self.window)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _window_mask(tokens: int, window: int, device: torch.device) -> Tensor:
    """Which tokens each token sees, for the plain model."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril().triu(1 - window)


class Block(nn.Module):
    """A layer: attention, then a feed-forward network, each behind a norm and added to its input.

    Args:
        config: Shape of the model.
        layer: The layer's number in the whole model.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config, layer)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, config.ffn_hidden)
        self.down = nn.Linear(config.ffn_hidden, config.hidden)

    def forward(self, x: Tensor, cache: SliceCache | None) -> Tensor:
        x = x + self.attention(self.norm1(x), cache)
        wide = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        out: Tensor = x + self.down(wide)
        return out


def _has(stage: nn.Module, name: str) -> bool:
    """Whether a stage has a module of this name; ``layers.*.up`` stands for all layers."""
    module = getattr(stage, name.partition(".")[0])
    return module is not None and (not isinstance(module, nn.ModuleDict) or len(module) > 0)


class GPT(Stage, PipelineModel):
    """A decoder, or some of its layers: a stage is a GPT with the other layers left out.

    ``model.loss(model(ids), labels)`` is the plain model on one device; ``Pipeline(model, plan)`` the same in stages.
    Every parameter is drawn from a generator seeded with its name, so the same seed gives the same model however it is
    split. To build a model too large for one device, build it under ``torch.device("meta")``: each rank then makes real
    only its own stage.

    Args:
        config: Shape of the model, for example ``PRESETS["gpt-tiny"]``.
        seed: Of the weights.

    Attributes:
        first: The first layer that this part holds.
        last: The one after its last.
        cut: Devices among which the tokens of hidden states are shared out between stages (sequence parallelism).
    """

    config: GPTConfig
    has_bare_ends = True

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self._describe(config, seed, 0, config.layers)
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocab, config.hidden)
        self.positions: nn.Embedding | None = nn.Embedding(config.max_seq_len, config.hidden)
        # Keyed by the layer's number in the whole model, so that a stage's parameters keep their names.
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(config.hidden)
        self.head: nn.Linear | None = nn.Linear(config.hidden, config.vocab, bias=False)
        self._tie()
        self.init_weights()

    def _describe(self, config: GPTConfig, seed: int, first: int, last: int) -> None:
        self.config, self.seed, self.first, self.last = config, seed, first, last
        self.num_layers, self.hidden_size = config.layers, config.hidden
        self.vocabulary = config.vocab, config.vocab
        self.tied = ("embedding.weight", "head.weight") if config.tied else ()
        self.cut = 1

    @classmethod
    def from_preset(cls, name: str, *, seed: int = 0) -> Self:
        """A model of a known shape.

        Args:
            name: One of ``PRESETS``.
            seed: Of the weights.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
        return cls(PRESETS[name], seed=seed)

    def planning_spec(self) -> ModelSpec:
        return ModelSpec(self.config, bare_ends=self.has_bare_ends)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws all weights that are real; those on the meta device are drawn when a stage makes them so."""
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                _copy_to(parameter, self._draw(name, parameter))

    def _draw(self, name: str, parameter: Tensor) -> Tensor:
        """A weight from a normal distribution. Those whose output is added to the residual stream get a smaller one, as
        in GPT-2: otherwise the stream would grow with the number of layers."""
        # A tied head has the embedding's name on the first stage and its own on the last; both draw the same.
        source = "embedding.weight" if self.config.tied and name == "head.weight" else name
        digest = hashlib.blake2b(f"{self.seed}/{source}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        residual = name.endswith(("attention.out.weight", "down.weight"))
        std = 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02
        return torch.empty(parameter.shape).normal_(std=std, generator=generator)

    # The plain model

    def forward(self, x: Tensor, cache: SliceCache | None = None) -> Tensor:
        """Computes hidden states.

        Args:
            x: Token ids, (sequences, tokens); on a later stage the hidden states that the stage before returned.
            cache: What earlier slices left; None for whole sequences.

        Returns:
            (sequences, tokens, hidden), before the last norm.
        """
        if self.embedding is not None and self.positions is not None:
            places = torch.arange(x.shape[1], device=x.device)[None] if cache is None else cache.positions(x.device)
            x = self.embedding(x) + self.positions(places)
        for block in self.layers.values():
            x = block(x, cache)
        return x

    def before_head(self, hidden: Tensor) -> tuple[Tensor, nn.Module]:
        """The normed hidden states and the head, for losses that multiply by the head themselves.

        Args:
            hidden: What ``forward`` of the last stage returned.
        """
        if self.norm is None or self.head is None:
            raise ValueError(f"only the last stage has a head, this one holds layers {self.first} to {self.last}")
        return self.norm(hidden), self.head

    def logits(self, hidden: Tensor) -> Tensor:
        normed, head = self.before_head(hidden)
        logits: Tensor = head(normed)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precisions are too coarse for a sum

    # As a PipelineModel

    @property
    def is_verified(self) -> bool:
        """Whether it is the model that the tests prove exact: no subclass, no other modules, no hooks."""
        kinds = {GPT, Attention, Block, nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleDict}
        hooked = (m._forward_hooks or m._forward_pre_hooks for m in self.modules())
        return all(plain_class(m) in kinds for m in self.modules()) and not any(hooked)

    def stage(
        self,
        first: int,
        last: int,
        device: torch.device,
        tp: TensorParallel | None = None,
        *,
        embeds: bool | None = None,
        has_head: bool | None = None,
    ) -> "GPT":
        """Makes the stage with layers ``first`` up to, not including, ``last``.

        It shares this model's modules; a model on the meta device is left as it is and the stage made anew.

        Args:
            first: 0 for the stage that also embeds tokens.
            last: ``num_layers`` for the stage that also has the head.
            device: Where its parameters are to be.
            tp: Splits operators over these devices.
            embeds: Whether it embeds tokens; by default if ``first`` is 0.
            has_head: Whether it has norm and head; by default if ``last`` is ``num_layers``.
        """
        embeds, has_head = self.ends_of(first, last, embeds, has_head)
        part = GPT.__new__(GPT)
        nn.Module.__init__(part)
        part._describe(self.config, self.seed, first, last)
        part.embedding, part.positions = (self.embedding, self.positions) if embeds else (None, None)
        part.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in range(first, last)})
        part.norm, part.head = (self.norm, self.head) if has_head else (None, None)
        is_meta = any(p.is_meta for p in part.parameters())
        if is_meta:
            part = copy.deepcopy(part)
        if tp is not None:
            part._parallelize(tp)
        if is_meta:
            part.to_empty(device=device)
            part._tie()
            part.init_weights()
        return part.to(device)

    def _tie(self) -> None:
        """Makes head and embedding one parameter where the model says so and both are here."""
        if self.config.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def _parallelize(self, tp: TensorParallel) -> None:
        """Splits attention by its heads, the feed-forward by its width, embedding and head by the vocabulary.

        ::

            between   into: by outputs (Colwise)     inside          out of: by inputs (Rowwise)   between
            x    -->  qkv   some heads each     -->  attention  -->  out   sums over devices   --> x
            x    -->  up    some of the width   -->  gelu       -->  down  sums over devices   --> x

        So a layer exchanges numbers twice. Head and embedding are split alike, so that they can share a weight.

        Args:
            tp: The devices, and whether tokens are shared out between operators.
        """
        parts = tp.mesh.size()
        for name, number in (("kv_heads", self.config.num_kv_heads), ("ffn", self.config.ffn_hidden)):
            if number % parts:
                raise ValueError(
                    f"tp must divide the model's {name}, got tp {parts} and {name} {number}; "
                    "take a smaller tp and more stages or replicas"
                )
        # Between operators every device has all tokens, or some of them: the same bytes are exchanged either way.
        between: Placement = Shard(1) if tp.sequence_parallel else Replicate()
        norm = SequenceParallel(use_local_output=True) if tp.sequence_parallel else _Replicated()
        into = _GatheringColwise(input_layouts=between) if tp.sequence_parallel else ColwiseParallel()
        out_of = RowwiseParallel(output_layouts=between)
        styles: dict[str, ParallelStyle] = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "positions": _Replicated(between),
            "layers.*.norm1": norm,
            "layers.*.attention.qkv": into,
            "layers.*.attention.out": out_of,
            "layers.*.norm2": norm,
            "layers.*.up": into,
            "layers.*.down": out_of,
            "norm": norm,
            "head": ColwiseParallel(input_layouts=between, use_local_output=False),
        }
        # A stage may have no embedding, no head, and at an end no layers; torch would warn of each.
        present = {name: style for name, style in styles.items() if _has(self, name)}
        parallelize_module(self, tp.mesh, present, src_data_rank=None)
        self._tie()
        self.cut = parts if tp.sequence_parallel else 1

    # As a Stage

    def make_cache(self, size: int, seq_len: int) -> SliceCache:
        """Refuses sequences that are longer than the table of positions.

        Args:
            size: Sequences of the microbatch.
            seq_len: Tokens of each.
        """
        if seq_len > self.config.max_seq_len:
            raise ValueError(
                f"the model has positions for {self.config.max_seq_len} tokens, got sequences of {seq_len}"
            )
        return SliceCache(seq_len)

    def hidden_shape(self, size: int, length: int) -> tuple[int, ...]:
        """With sequence parallelism a device holds some of the tokens of hidden states between stages.

        Args:
            size: Sequences of the slice.
            length: Its tokens, a multiple of the number of devices.
        """
        return (size, length // self.cut, self.config.hidden)


@torch.no_grad()
def _copy_to(x: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor, or this device's part of it, to a parameter.

    Args:
        x: The parameter, maybe a DTensor.
        whole: The same numbers on every device: nothing is sent.
    """
    if isinstance(x, DTensor):
        whole = distribute_tensor(whole.to(x.device), x.device_mesh, x.placements, src_data_rank=None).to_local()
    to_local(x).copy_(whole)
