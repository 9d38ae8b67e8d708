"""Runs a small Hugging Face model whole, and in stages and slices in one process; compares loss and gradients.

    reference(model, batch)                        whole model, transformers' own forward, torch's backward
    SlicedModel(model, ...)(batch, slice_lengths)  stages, slices, our caches
    errors(wanted, computed)                       {"loss": 2e-16, "model.layers.*.mlp.up_proj.weight": 1e-15, ...}

Both get the same two rows of 29 random tokens, with labels that have nothing to do with them: so no gradient is small
because the model happens to be right. Two labels do not count, as real batches have such.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from terapipe.hf.backends import Backend
from terapipe.hf.rope import depends_on_length
from terapipe.hf.routers import FLAG, router_losses
from terapipe.hf.stage import DecoderStage, loss_of
from terapipe.hf.structure import ModelStructure, is_classifier, text_config, token_logits
from terapipe.modeling.stage import IGNORE, TensorParallel
from terapipe.modeling.stage_chain import StageChain, changed_buffers, relative_error
from terapipe.planning.recompute import Recompute

TOKENS = 29

Starts = tuple[tuple[int, ...], ...]  # per row, where documents begin
Result = tuple[float, dict[str, Tensor]]  # loss and gradients


@dataclass(frozen=True)
class Batch:
    """Two rows of random tokens, each one document or several packed ones.

    Args:
        ids: (2, tokens).
        labels: (2, tokens); -100 at one place of each row.
        documents: Where documents begin in each row; empty if each is one document.
    """

    ids: Tensor
    labels: Tensor
    documents: Starts = ()

    @classmethod
    def of(cls, model: PreTrainedModel, tokens: int = TOKENS, documents: Starts = (), seed: int = 0) -> "Batch":
        """A batch for a model, on its device.

        Args:
            model: Whose vocabulary and device it is for; a classifier has labels 0 to 2.
            tokens: Of each row.
            documents: Where documents begin.
            seed: Of tokens and labels.
        """
        generator = torch.Generator().manual_seed(seed)
        vocabulary = int(min(model.get_input_embeddings().num_embeddings, text_config(model.config).vocab_size))
        ids, labels = (torch.randint(vocabulary, (2, tokens), generator=generator) for _ in range(2))
        if is_classifier(model):
            labels %= 3
        labels[0, 3] = labels[1, -1] = IGNORE
        return cls(ids.to(model.device), labels.to(model.device), documents)

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


def uneven_lengths(num_slices: int, min_slice: int, tokens: int = TOKENS) -> tuple[int, ...]:
    """Lengths of slices that add up to ``tokens``, one of them the least. For 4 slices: (5, 1, 13, 10).

    Lengths differ because equal ones hide faults: a slice that took its neighbor's positions would look right.

    Args:
        num_slices: How many.
        min_slice: The least tokens of a slice. One has just so many: the hardest case for convolutions.
        tokens: Of the sequence.
    """
    most = tokens // (2 * min_slice)
    if not 1 <= num_slices <= most:
        raise ValueError(f"a check divides {tokens} tokens into 1 to {most} slices, got {num_slices}")
    if num_slices == 1:
        return (tokens,)
    rest, weights = tokens - min_slice * num_slices, [(5 * i) % 7 + 1 for i in range(num_slices - 1)]
    lengths = [min_slice + rest * weight // sum(weights) for weight in weights]
    lengths.insert(1, min_slice)
    lengths[-1] += tokens - sum(lengths)
    return tuple(lengths)


def updated_buffers(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """The names of buffers that ``run`` changes, such as running means. Those of rotary embeddings by length do not
    count: stages set them for each slice.

    Args:
        model: Whose buffers are compared.
        run: Calls the model once.
    """
    before = {name: x.clone() for name, x in _buffers(model)}
    run()
    return changed_buffers(before, dict(_buffers(model)))


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        if not depends_on_length(module):
            yield from ((f"{name}.{key}", x) for key, x in module._buffers.items() if x is not None)


def reference(model: PreTrainedModel, batch: Batch) -> Result:
    """Loss and gradients of the whole model, which gets each document alone.

    If rotary frequencies depend on the length, documents alone would get other frequencies than packed ones. Such
    models get them in one row, with positions that restart, as transformers packs them.

    Args:
        model: Which stays as it is.
        batch: Its loss is the mean over the labels that count.

    Returns:
        The loss, and gradients by the parameters' names.
    """
    whole = copy.deepcopy(model)
    if batch.documents and any(depends_on_length(module) for module in whole.modules()):
        restarting = [torch.arange(b - a) for row in batch.documents for a, b in pairwise([*row, batch.tokens])]
        positions = torch.cat(restarting).reshape(batch.ids.shape).to(batch.ids.device)
        logits = token_logits(whole, input_ids=batch.ids, position_ids=positions, use_cache=False)
        loss = loss_of(logits, batch.labels, whole)
    elif batch.documents:
        losses = [
            loss_of(token_logits(whole, input_ids=batch.ids[piece], use_cache=False), batch.labels[piece], whole)
            for piece in (
                (slice(i, i + 1), slice(a, b))
                for i, row in enumerate(batch.documents)
                for a, b in pairwise([*row, batch.tokens])
            )
        ]
        loss = torch.stack(losses).sum()
    else:
        loss = loss_of(token_logits(whole, input_ids=batch.ids, use_cache=False), batch.labels, whole)
    loss = loss / (batch.labels != IGNORE).sum() + _router_loss(whole, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def adds_router_loss(model: PreTrainedModel, batch: Batch) -> bool:
    """Whether transformers adds something to the loss for the routers. Not all models with routers do.

    Args:
        model: With routers.
        batch: Any.
    """
    with torch.no_grad():
        out = model(input_ids=batch.ids, labels=batch.ids, use_cache=False, output_router_logits=True)
    return isinstance(getattr(out, "aux_loss", None), Tensor)


def _router_loss(model: PreTrainedModel, batch: Batch) -> Tensor | float:
    """What transformers adds to the loss for the routers, whatever it is: the difference with and without."""
    if not getattr(text_config(model.config), FLAG, False) or is_classifier(model):
        return 0.0
    total, rest = (
        model(input_ids=batch.ids, labels=batch.ids, use_cache=False, output_router_logits=added).loss
        for added in (True, False)
    )
    added: Tensor = total - rest
    return added


class SlicedModel:
    """All stages of a model in this process, computed slice by slice.

    Each stage has a copy of the model, as if it were in a process of its own. ``StageChain`` runs them rather than a
    ``Pipeline`` of one rank: a ``Decoder`` verifies itself on every rank of a program that runs already, and a Pipeline
    there would be one of all its ranks. So verification sends nothing and needs no process group.

    Args:
        model: The small copy, which stays as it is.
        structure: Where its layers are.
        backend: What carries state between slices.
        num_stages: How many stages to make; a model with fewer layers gets one per layer.
        tp: Split the operators of all stages over this mesh.

    Attributes:
        stages: In their order.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: ModelStructure,
        backend: Backend | None,
        num_stages: int = 2,
        tp: TensorParallel | None = None,
    ) -> None:
        self._tied, routers = structure.tied, router_losses(model)
        num_layers = len(list(model.get_submodule(structure.layers).children()))
        edges = [num_layers * k // num_stages for k in range(num_stages + 1)]
        self.stages = [
            DecoderStage(copy.deepcopy(model), structure, first, last, backend, routers=routers)
            for first, last in pairwise(edges)
            if first < last
        ]
        if tp is not None:
            for stage in self.stages:
                stage.parallelize(tp)
        self._chain = StageChain(self.stages)

    def train(self, mode: bool) -> None:
        """Sets training or evaluation mode of all stages."""
        for stage in self.stages:
            stage.train(mode)

    def __call__(self, batch: Batch, slice_lengths: Sequence[int], *, recompute: Recompute = "none") -> Result:
        """Loss and gradients of a batch, which are to be those of ``reference``.

        Args:
            batch: The same.
            slice_lengths: Which add up to its tokens.
            recompute: What backwards compute again.
        """
        for stage in self.stages:
            stage.zero_grad()
        last, counted = self.stages[-1], (batch.labels != IGNORE).sum()

        def mean_loss(hidden: Tensor, start: int, end: int) -> Tensor:
            return last.loss(hidden, batch.labels[:, start:end]) / counted

        chain = self._chain.run(
            batch.ids,
            slice_lengths,
            mean_loss,
            mode=recompute,
            watch=lambda cache: cache.set_documents(batch.documents),
        )
        return chain.loss, self._gradients()

    def _gradients(self) -> dict[str, Tensor]:
        """By their names in the whole model. Gradients of a weight that first and last stage share are added."""
        gradients: dict[str, Tensor] = {}
        for stage in self.stages:
            for own, p in stage.named_parameters():
                name = self._tied[0] if own in self._tied else own
                if p.grad is not None:
                    gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                    gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients


def errors(wanted: Result, computed: Result) -> dict[str, float]:
    """The largest error of each group of parameters; a group is a name without the layer's number.

    Relative to the largest gradient of the model, because some gradients are zero but for rounding.

    Args:
        wanted: By ``reference``.
        computed: By a ``SlicedModel``.
    """
    largest = max(gradient.abs().max().item() for gradient in wanted[1].values())
    loss, own_loss = (torch.tensor(result[0], dtype=torch.float64) for result in (wanted, computed))
    groups = {"loss": relative_error(loss, own_loss)}
    for name in wanted[1].keys() | computed[1].keys():
        truth, mine = wanted[1].get(name), computed[1].get(name)
        if truth is None or mine is None:  # a gradient of zeros may be missing
            rest = mine if truth is None else truth
            error = 0.0 if rest is None or not rest.any() else float("inf")
        else:
            error = relative_error(truth, mine, largest)
        group = re.sub(r"\.\d+\.", ".*.", name)
        groups[group] = max(groups.get(group, 0.0), error)
    return groups
