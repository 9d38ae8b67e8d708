"""What a pipeline computes by forwards only, beside evaluation: log-probabilities, hidden states, logits."""

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from terapipe.planning.slices import Plan
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.executors import Executors
from terapipe.runtime.generation import Generation
from terapipe.runtime.gradient_sync import GradientSync
from terapipe.runtime.inputs import Documents
from terapipe.runtime.loss_head import logits
from terapipe.runtime.module_tree import ModelPart
from terapipe.runtime.preflight import Admission


class Forwards(ModelPart):
    """A part of ``Pipeline``, which sets what is declared here."""

    plan: Plan
    _transport: Transport
    _executors: Executors | None
    _sync: GradientSync
    _admission: Admission
    _generation: Generation
    _is_sharded: bool

    def failing_together(self) -> AbstractContextManager[None]:
        """For what all ranks do together: an error inside stops the others too, with this rank's error."""
        return self._transport.failure.failing_together(lambda: self._executors and self._executors.current.at)

    def _loss_parallel(self) -> AbstractContextManager[None]:
        """A loss over a vocabulary in parts is known to torch within this context only, its gradient too."""
        return loss_parallel() if self._transport.tp_size > 1 else nullcontext()

    @torch.no_grad()
    def log_probs(self, input_ids: Tensor | None, labels: Tensor | None, documents: Documents | None = None) -> Tensor:
        """The log-probability of each label, (rows, tokens), on every rank; 0 where the label is -100.

        By forwards only: for reference models and the policies that made completions. Any number of sequences of any
        length, cut as the plan cuts its own. If it is not the plan's shape, every rank must be given ``input_ids`` or
        ``labels``. Each replica has its own, but all call it together. Call ``eval()`` before, where it matters.
        """
        self._generation.check(self.stages.get(self.plan.num_stages - 1))
        batch, executor = self._admission.scored(input_ids, labels, documents)
        given = input_ids if input_ids is not None else labels
        with self.failing_together(), self._loss_parallel():
            found = self._generation.log_probs(batch, executor, None if given is None else given.shape[1])
        return found if given is None else found[:, : given.shape[1]]

    @torch.no_grad()
    def hidden_states(self, input_ids: Tensor | None, documents: Documents | None = None) -> Tensor | None:
        """What the head would be called with, before any norm: (batch, tokens, hidden) where the last stage is, None
        elsewhere. By forwards only, of a batch of the plan's shape: for teachers, whose logits of a whole batch would
        not fit; see ``logits`` and ``losses.distillation``."""
        if self._transport.tp_size > 1:
            raise ValueError("hidden states are split over ranks with tensor parallel; take tp 1")
        batch, executor = self._admission.unscored(input_ids, documents)
        with self.failing_together():
            return self._generation.hidden_states(batch, executor)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states, where the last stage is: (rows, tokens, vocabulary). Not with ``shard``: parameters are in
        parts between steps."""
        if self._is_sharded:
            raise ValueError("parameters are in parts between steps with shard=True; take shard=False for a teacher")
        return logits(self._sync.stages[self.plan.num_stages - 1], hidden)

    @torch.no_grad()
    def next_token_logits(self, input_ids: Tensor | None) -> Tensor:
        """The scores of the token after each sequence, (rows, vocabulary), on every rank.

        By forwards only, of any number of sequences of any length: (rows, tokens), the same on every rank of a
        pipeline. Each replica has its own, but all call it together. Call ``eval()`` before, where it matters.
        """
        self._generation.check(self.stages.get(self.plan.num_stages - 1))
        padded, executor = self._admission.prompt(input_ids, self.plan)
        with self.failing_together():
            return self._generation.next_token_logits(padded, cast(Tensor, input_ids).shape[1], executor)
