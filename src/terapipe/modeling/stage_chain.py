"""Stages of a model computed slice by slice in one process, without a schedule: what verification runs."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terapipe.modeling.slice_cache import SliceCache, run_backward
from terapipe.modeling.stage import RandomState, SlicedStage, Stage
from terapipe.modeling.weight_grads import accumulate_deferred
from terapipe.planning.recompute import Recompute

SliceLoss = Callable[[Tensor, int, int], Tensor]  # of a slice's last hidden states, its first token and its end
Sums = dict[str, Tensor]  # for auxiliary losses, by their names


class ChainResult(NamedTuple):
    """What a run computed, beside the gradients in ``.grad`` of the parameters."""

    loss: float
    output: Tensor  # hidden states of the last stage, of all tokens
    input_gradient: Tensor | None  # if the first stage's input is floating
    attached: bool  # whether the output of every stage has a gradient


class StageChain:
    """The forwards of all slices in order, each through all stages, then the backwards in reverse.

    ::

        forwards    stage 0, slice 0    stage 1, slice 0    stage 0, slice 1    stage 1, slice 1
        backwards   stage 1, slice 1    stage 0, slice 1    stage 1, slice 0    stage 0, slice 0

    Weight gradients come last, as in orders with split backwards.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = [SlicedStage(stage) for stage in stages]
        self.caches: list[SliceCache] = []  # of the last run

    def run(
        self,
        x: Tensor,
        lengths: Sequence[int],
        loss: SliceLoss,
        *,
        mode: Recompute = "none",
        watch: Callable[[SliceCache], None] = lambda cache: None,
    ) -> ChainResult:
        """Forward and backward of one microbatch.

        - ``x``: token ids, or hidden states for a first stage that is not the model's first.
        - ``lengths``: tokens of each slice; one length is the whole sequence.
        - ``loss``: called with each slice's hidden states; its values are summed.
        - ``mode``: what backwards compute again.
        - ``watch``: called with each new cache, for checks that look into it.

        Auxiliary losses are computed between forwards and backwards, from the sums of all slices and stages.
        """
        size = x.shape[0]
        self.caches = [each.stage.make_cache(size, sum(lengths)) for each in self._stages]
        for cache in self.caches:
            watch(cache)
        starts = [0, *accumulate(lengths)][:-1]
        slices = [_Slice(start, length) for start, length in zip(starts, lengths, strict=True)]
        parts = _split_tokens(self._stages[0].stage, x, size, lengths)
        total, outputs = 0.0, []
        for one, part in zip(slices, parts, strict=True):
            hidden = part.detach().requires_grad_(part.is_floating_point())
            for k in range(len(self._stages)):
                hidden = one.forward(self._stages[k], self.caches[k], hidden, mode)
            outputs.append(hidden.detach())
            with self._stages[-1].over(self.caches[-1]):
                value = loss(hidden, one.start, one.start + one.length)
                run_backward([value])
            total += value.item()
            one.inputs.append(hidden)
        added, gradients = self._auxiliary([sums for one in slices for sums in one.sums])
        for one in reversed(slices):
            for k in reversed(range(len(self._stages))):
                one.backward(self._stages[k], self.caches[k], k, mode, gradients)
        accumulate_deferred(part for one in slices for part in one.deferred)
        output, gradient = self._join(outputs, [one.inputs[0] for one in slices], size)
        return ChainResult(total + added, output, gradient, all(one.attached for one in slices))

    def _auxiliary(self, sums: Sequence[Sums]) -> tuple[float, Sums]:
        """The auxiliary losses of the totals, and the gradient of each with respect to any of its summands."""
        value, gradients = 0.0, {}
        for name, loss in self._stages[0].stage.auxiliary_losses.items():
            summands = [by_name[name].detach() for by_name in sums if name in by_name]
            if summands:
                totals = torch.stack(summands).sum(0).requires_grad_()
                with torch.enable_grad():
                    term = loss.value(totals)
                (gradients[name],) = torch.autograd.grad(term, totals)
                value += term.item()
        return value, gradients

    def _join(self, outputs: list[Tensor], inputs: list[Tensor], size: int) -> tuple[Tensor, Tensor | None]:
        dim = token_dim(self._stages[-1].stage, size)
        if not inputs[0].is_floating_point():
            return torch.cat(outputs, dim), None
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        return torch.cat(outputs, dim), torch.cat(gradients, token_dim(self._stages[0].stage, size))


class _Slice:
    """What is kept of a slice between its forwards and its backwards."""

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length
        self.inputs: list[Tensor] = []  # of each stage, at last of the loss
        self._outputs: list[Tensor] = []
        self.sums: list[Sums] = []  # of each stage
        self._random: list[RandomState] = []
        self.deferred: list[Any] = []  # gradients of weights, of all stages
        self.attached = True

    def forward(self, sliced: SlicedStage, cache: SliceCache, x: Tensor, mode: Recompute) -> Tensor:
        """Returns the input of what follows: a leaf, as if it had been received from another rank."""
        context = cache.begin(self.start, self.length)
        self._random.append(RandomState.now(x.device))
        with torch.set_grad_enabled(mode != "full"):
            out = sliced.forward(x, cache, block=mode == "block")
        self.inputs.append(x)
        self._outputs.append(out)
        self.sums.append(context.pop_sums())
        return out.detach().requires_grad_()

    def backward(self, sliced: SlicedStage, cache: SliceCache, k: int, mode: Recompute, gradients: Sums) -> None:
        """``gradients`` are those of the sums for auxiliary losses."""
        context = cache.begin(self.start, self.length, defer=True)
        out, sums = self._outputs[k], self.sums[k]
        if mode == "full":
            with self._random[k].restored():
                out = sliced.forward(self.inputs[k], cache)
            sums = context.pop_sums()
        self.attached &= out.requires_grad
        gradient = self.inputs[k + 1].grad
        if gradient is None:
            gradient = torch.zeros_like(out)
        others = [(x, gradients[name].to(x.dtype)) for name, x in sums.items() if x.requires_grad]
        if out.requires_grad or others:  # a first stage may have nothing to train
            sliced.backward(cache, out, gradient, others)
        self.deferred += context.pop_deferred()


def token_dim(stage: Stage, size: int) -> int:
    """The dimension of hidden states that grows with the tokens of a slice."""
    few, many = stage.hidden_shape(size, 16), stage.hidden_shape(size, 32)
    return next(dim for dim, (a, b) in enumerate(zip(few, many, strict=True)) if a != b)


def _split_tokens(stage: Stage, x: Tensor, size: int, lengths: Sequence[int]) -> Sequence[Tensor]:
    if not x.is_floating_point():
        return torch.split(x, list(lengths), 1)
    dim = token_dim(stage, size)
    return torch.split(x, [stage.hidden_shape(size, length)[dim] for length in lengths], dim)


def device_of(stage: Stage) -> torch.device:
    return next((p.device for p in stage.parameters()), torch.device("cpu"))
