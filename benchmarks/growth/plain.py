"""A rank's actions without the executor: calls of stages, autograd and torch.distributed, and no checks."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from terapipe import Action, Op, Plan, Slice, SliceCache, Stage

Key = tuple[int, Slice]


class PlainRank:
    """One of two ranks. The batch is one sequence, and hidden states are one number for each token.

    Args:
        plan: what they run.
        rank: 0 or 1.
        actions: of this rank.
        stages: of this rank, by number.
    """

    def __init__(self, plan: Plan, rank: int, actions: Sequence[Action], stages: Mapping[int, Stage]) -> None:
        self._actions, self._peer, self._last = actions, 1 - rank, plan.num_stages - 1
        self._stages = stages
        self._caches = {k: SliceCache(plan.seq_len) for k in self._stages}
        self._ids = torch.zeros(1, plan.seq_len, dtype=torch.int64)
        self._perform = {
            Op.F: self._forward, Op.B: self._backward, Op.I: self._backward, Op.W: lambda k, s: None,
            Op.SEND_F: self._send_output, Op.SEND_B: self._send_gradient,
            Op.RECV_F: self._receive_input, Op.RECV_B: self._receive_gradient,
        }  # fmt: skip

    def step(self) -> None:
        self._arriving: dict[Key, dist.Work] = {}  # by the stage whose output or gradient it is
        self._sent: list[dist.Work] = []
        self._inputs: dict[Key, Tensor] = {}
        self._outputs: dict[Key, Tensor] = {}
        self._gradients: dict[Key, Tensor] = {}
        for op, k, s in self._actions:
            self._perform[op](k, s)
        for work in self._sent:
            work.wait()

    def _forward(self, k: int, s: Slice) -> None:
        self._arrive(k - 1, s)
        x = self._outputs[k - 1, s].detach().requires_grad_() if k else self._ids[:, s.context : s.end]
        self._caches[k].begin(s.context, s.length)
        self._inputs[k, s], self._outputs[k, s] = x, self._stages[k](x, self._caches[k])
        if k == self._last:
            hidden = self._outputs[k, s].detach().requires_grad_()
            self._stages[k].loss(hidden, self._ids[:, s.context : s.end]).backward()
            assert hidden.grad is not None
            self._gradients[k, s] = hidden.grad

    def _backward(self, k: int, s: Slice) -> None:
        self._arrive(k, s)
        torch.autograd.backward(self._outputs.pop((k, s)), self._gradients.pop((k, s)))
        x = self._inputs.pop((k, s))
        if x.grad is not None:
            self._gradients[k - 1, s] = x.grad

    def _arrive(self, k: int, s: Slice) -> None:
        if (k, s) in self._arriving:
            self._arriving.pop((k, s)).wait()

    def _receive_input(self, k: int, s: Slice) -> None:
        self._receive(self._outputs, k - 1, s)

    def _receive_gradient(self, k: int, s: Slice) -> None:
        self._receive(self._gradients, k, s)

    def _receive(self, kept: dict[Key, Tensor], k: int, s: Slice) -> None:
        kept[k, s] = torch.empty(1, s.length, 1)
        work = dist.irecv(kept[k, s], self._peer)
        assert work is not None
        self._arriving[k, s] = work

    def _send_output(self, k: int, s: Slice) -> None:
        self._send(self._outputs[k, s].detach())

    def _send_gradient(self, k: int, s: Slice) -> None:
        self._send(self._gradients.pop((k - 1, s)))

    def _send(self, tensor: Tensor) -> None:
        work = dist.isend(tensor, self._peer)
        assert work is not None
        self._sent.append(work)
