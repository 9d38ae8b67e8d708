"""Auxiliary losses of one run: sums of layers on their way to the last stage, and the gradient of their loss back."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from terapipe.modeling.stage import AuxiliaryLoss
from terapipe.planning.slices import Plan, Slice
from terapipe.runtime.loss_head import Batch

Sums = dict[str, Tensor]


class AuxiliaryLosses:
    """Sums are one vector, in order of the losses' names. The last forward of a microbatch takes it to the next stage,
    the first backward brings the gradient, with the messages that are sent anyway::

        stage 0  sums -----> stage 1  adds its own -----> last stage  adds its own, loss = f(totals)
                                                                          |
        stage 0  <---------- stage 1  <-------------------------- gradient of the totals

    The gradient of a total is that of every sum in it, so the way back only copies.

    Args:
        losses: the stages' own, by name.
        plan: that of the batches.
        device: where sums are kept.
        sum_over_replicas: for losses of all replicas.
    """

    def __init__(
        self,
        losses: Mapping[str, AuxiliaryLoss],
        plan: Plan,
        device: torch.device,
        sum_over_replicas: Callable[[Tensor], Tensor],
    ) -> None:
        self._losses, self._plan, self._device = losses, plan, device
        self._sum_over_replicas = sum_over_replicas
        self._parts: dict[str, slice] = {}
        self.size = 0
        for name in sorted(losses):
            self._parts[name] = slice(self.size, self.size + losses[name].size)
            self.size += losses[name].size
        self.begin(Batch(plan), train=False)

    def begin(self, batch: Batch, *, train: bool) -> None:
        """Forgets what an earlier run left.

        Args:
            batch: what is run.
            train: whether gradients will be asked for.
        """
        self._batch, self._train = batch, train
        self._totals: dict[tuple[int, int], Tensor] = {}  # by stage and microbatch, of stages up to this one
        self._gradients: dict[int, Tensor] = {}  # by microbatch
        self._waiting: list[int] = []  # microbatches whose totals are known
        self.loss: Tensor | None = None
        self.metrics: Sums = {}

    # Forwards

    def receive(self, k: int, s: Slice, totals: Tensor) -> None:
        """Takes totals from the stage before, ahead of this stage's last forward of the microbatch.

        Args:
            k: this stage.
            s: the slice that they came with.
            totals: of all stages before.
        """
        self._room(k, s).add_(totals)

    def add(self, k: int, s: Slice, sums: Sums) -> None:
        """Adds the sums of a slice.

        Args:
            k: this stage.
            s: which slice.
            sums: those of its layers, by name of the loss.
        """
        unknown = sums.keys() - self._losses.keys()
        if unknown:
            raise ValueError(
                f"a layer added sums for {sorted(unknown)}, but the stage's auxiliary_losses are {sorted(self._losses)}"
            )
        for name, value in sums.items():
            if value.shape != (self._losses[name].size,):
                raise ValueError(
                    f"sums of {name!r} must be of shape ({self._losses[name].size},), as its AuxiliaryLoss says, got "
                    f"{tuple(value.shape)}"
                )
            self._room(k, s)[self._parts[name]] += value.detach()

    def totals(self, k: int, s: Slice) -> Tensor:
        """The totals of a microbatch so far.

        Args:
            k: up to this stage.
            s: a slice of the microbatch.
        """
        return self._room(k, s)

    def _room(self, k: int, s: Slice) -> Tensor:
        key = (k, s.microbatch)
        if key not in self._totals:
            self._totals[key] = torch.zeros(self.size, dtype=torch.float64, device=self._device)
        return self._totals[key]

    def complete(self, k: int, s: Slice) -> None:
        """On the last stage, after the last forward of a microbatch."""
        if self._batch.row_share is None:  # values of tokens: nobody asks for the loss
            return
        self._gradients[s.microbatch] = torch.zeros(self.size, dtype=torch.float64, device=self._device)
        self._evaluate("microbatch", self._room(k, s), [s.microbatch])
        self._waiting.append(s.microbatch)
        if len(self._waiting) == len(self._plan.sizes):
            batch = torch.stack([self._totals[k, m] for m in self._waiting]).sum(0)
            self._evaluate("batch", batch, self._waiting)
            if any(loss.over == "replicas" for loss in self._losses.values()):
                rows = batch.new_full((1,), self._plan.batch_size)
                everyone = self._sum_over_replicas(torch.cat([batch, rows]))
                self._evaluate("replicas", everyone[:-1], self._waiting, everyone[-1])

    def _evaluate(self, over: str, totals: Tensor, microbatches: list[int], rows: Tensor | None = None) -> None:
        """``rows`` are the sequences that the totals are of, if not those of the microbatches."""
        here = sum(self._plan.sizes[m] for m in microbatches)
        share = self._batch.row_share
        assert share is not None
        for name, loss in self._losses.items():
            if loss.over != over:
                continue
            with torch.enable_grad():
                sums = totals[self._parts[name]].clone().requires_grad_()
                value = loss.value(sums)
                if value.numel() != 1:
                    raise ValueError(f"the auxiliary loss {name!r} must be a scalar, got shape {tuple(value.shape)}")
            if self._train:
                (gradient,) = torch.autograd.grad(value.reshape(()), sums)
                for m in microbatches:
                    self._gradients[m][self._parts[name]] = gradient * share * (here if rows is None else rows)
            part = value.detach().reshape(()).to(share.dtype) * share * here
            self.loss = part if self.loss is None else self.loss + part
            self.metrics[name] = self.metrics[name] + part if name in self.metrics else part

    # Backwards

    def gradient(self, s: Slice) -> Tensor:
        """The gradient of the totals of a microbatch.

        Args:
            s: a slice of it.
        """
        return self._gradients[s.microbatch]

    def receive_gradient(self, s: Slice, gradient: Tensor) -> None:
        """Takes the gradient from the stage after.

        Args:
            s: the slice that it came with.
            gradient: of the totals.
        """
        self._gradients[s.microbatch] = gradient

    def roots(self, s: Slice, sums: Sums) -> list[tuple[Tensor, Tensor]]:
        """A slice's sums with their gradients, as further roots of its backward.

        Args:
            s: which slice.
            sums: what its forward added.
        """
        return [
            (value, self.gradient(s)[self._parts[name]].to(value.dtype))
            for name, value in sums.items()
            if value.requires_grad
        ]
