"""Pipelines: ours, torch's and DeepSpeed's."""

import logging
import os
from collections.abc import Iterable
from contextlib import redirect_stdout
from itertools import cycle
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rivals.contest import CONFIG, FAMILY, Case, Contestant, Entrant
from benchmarks.step.measure import cross_entropy, equal_times, torch_step
from benchmarks.step.models import Cuts
from terapipe import GPT, Pipeline, Plan


def folded_plan(sequences: int, tokens: int) -> Plan:
    """``terapipe-v``, two chunks of layers per rank, cut as in benchmarks.step. With more than four sequences the first
    and the last are cut as with four, to fill and to drain; those between are whole."""
    first, *_, last = FAMILY.folded[4]
    cuts: Cuts = FAMILY.folded.get(sequences, (first, *[(2048,)] * (sequences - 2), last))
    return Plan((1,) * sequences, cuts, (0, 1, 2, 3, 4), "terapipe-v", 2).resize(sequences, tokens, 8)


def straight_plan(sequences: int, tokens: int) -> Plan:
    """``terapipe-deferred``, one chunk per rank: hidden states cross from rank to rank once, not three times."""
    slices = {1: 12, 2: 8}.get(sequences, 6)
    share = 0.32 if tokens <= 2048 else 0.65  # of attention in a sequence's time
    return Plan((1,) * sequences, (equal_times(tokens, slices, share),) * sequences, (0, 2, 4), "terapipe-deferred")


def ours(make: Any) -> Entrant:
    """
    Args:
        make: The plan by sequences and tokens.
    """

    def entrant(case: Case) -> Contestant:
        pipe = Pipeline(GPT(CONFIG), make(case.sequences, case.tokens))
        contestant = Contestant(pipe)
        contestant.backward = lambda: pipe.step(case.ids, case.labels)
        return contestant

    return entrant


def torch_pipeline(name: str) -> Entrant:
    """
    Args:
        name: Of a schedule of torch.distributed.pipelining.
    """

    def entrant(case: Case) -> Contestant:
        step, parts = torch_step(FAMILY, name, case.sequences, case.ids, case.labels)
        contestant = Contestant(parts)
        contestant.backward = step
        return contestant

    return entrant


class Embedding(nn.Module):
    """The first of the layers that DeepSpeed deals out."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt.stage(0, 0, gpt.head.weight.device, embeds=True, has_head=False)  # type: ignore[union-attr]

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.gpt(ids)
        return hidden


class Layer(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.block(hidden, None)
        return out


class Head(nn.Module):
    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))  # type: ignore[misc]
        return logits


def deepspeed_pipeline(case: Case) -> Contestant:
    """Its engine deals out embedding, layers and head, has each sequence as a microbatch, and does the whole step."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    logging.disable(logging.WARNING)
    with open(os.devnull, "w") as silence, redirect_stdout(silence):
        import deepspeed
        from deepspeed.pipe import PipelineModule

        # Shared memory is for inference alone, and would be compiled here, by both ranks at once.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")
        gpt = GPT(CONFIG)
        names = {id(p): name for name, p in gpt.named_parameters()}
        layers = [Embedding(gpt), *map(Layer, gpt.layers.values()), Head(gpt)]
        module = PipelineModule(layers, num_stages=2, loss_fn=cross_entropy, partition_method="uniform")
        contestant = Contestant(module, [names[id(p)] for p in module.parameters()])
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": case.sequences,
            "gradient_clipping": 0.0,  # by default it clips to a norm of 1
            "steps_per_print": 1 << 30,
        }
        engine, *_ = deepspeed.initialize(model=module, optimizer=contestant.optimizer, config=config)
    rows: Iterable[Any] = cycle(zip(case.ids.split(1), case.labels.split(1), strict=True))
    contestant.step = lambda: engine.train_batch(rows)  # type: ignore[method-assign]
    return contestant
