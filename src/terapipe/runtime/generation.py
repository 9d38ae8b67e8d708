"""Scores of tokens, by forwards through the pipeline that trains the model."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from terapipe.losses.tokens import token_log_probs
from terapipe.modeling.autocast import Autocast
from terapipe.modeling.slice_cache import longest_document
from terapipe.modeling.stage import Stage
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.executor import Executor
from terapipe.runtime.executors import Executors
from terapipe.runtime.gradient_sync import GradientSync
from terapipe.runtime.inputs import Batch
from terapipe.runtime.loss_head import LastHidden, TokenValues


class Generation:
    def __init__(self, plan: Plan, sync: GradientSync, executors: Executors, transport: Transport) -> None:
        self._plan, self._sync, self._executors, self._transport = plan, sync, executors, transport
        self._checked: set[bool] = set()  # what the last stage was asked

    def check(self, last: Stage | None, *, of_tokens: bool = True) -> None:
        """Asked once, of the last stage where it is. Refused on all ranks alike, before anything is sent: the pipeline
        can go on training. ``of_tokens``: whether logits are to be those of a vocabulary, not of classes."""
        if of_tokens in self._checked:
            return
        missing = "" if last is None or last.offers("logits") else type(last).__name__
        if of_tokens and last is not None and last.no_default_loss:
            missing = "a sequence classifier, which predicts no tokens,"
        found = next(filter(None, self._transport.gather(missing)), None)
        if found:
            raise ValueError(
                f"logits and log-probabilities need a last stage with a method logits(hidden), as terapipe.Stage "
                f"describes it; {found} has none"
            )
        self._checked |= {of_tokens, False}

    def next_token_logits(self, padded: Tensor, tokens: int, executor: Executor) -> Tensor:
        """After so many tokens of each row; the rest is padding."""
        output_head = LastHidden()
        with self._executors.once(executor):
            batch = Batch(executor.plan, padded if self._transport.rank == 0 else None)
            executor.run(batch, output_head, longest=tokens, train=False)
        logits = None if output_head.hidden is None else self._logits_at(tokens - 1, output_head.hidden)
        self._sync.finish()
        return self._to_all(logits, len(padded))

    def log_probs(self, batch: Batch, executor: Executor, tokens: int | None) -> Tensor:
        """Of the labels, (rows, tokens). Of each row so many tokens count, the rest is padding."""
        output_head = TokenValues(token_log_probs)
        longest = longest_document(batch.documents, tokens or batch.plan.seq_len)
        with self._executors.once(executor):
            executor.run(batch, output_head, longest=longest, train=False)
        self._sync.finish()
        shape, device = (batch.plan.batch_size, batch.plan.seq_len), self._transport.device
        found = torch.empty(shape, dtype=self._executors.wide, device=device)
        if batch.targets is not None:
            found.copy_(output_head.collected())
        return self._transport.broadcast(found, self._plan.last_rank, "the log-probabilities")

    def hidden_states(self, batch: Batch, executor: Executor) -> Tensor | None:
        """Of the last stage, where it is."""
        output_head = TokenValues()
        with self._executors.once(executor):
            executor.run(batch, output_head, train=False)
        self._sync.finish()
        return output_head.collected() if self._transport.rank == self._plan.last_rank else None

    def _logits_at(self, place: int, hidden: Tensor) -> Tensor:
        """Where devices share out the tokens, each has some of the places, one of them this one; all give one."""
        owner, index = divmod(place, hidden.shape[1])
        last = self._sync.stages[self._plan.num_stages - 1]
        with Autocast.current(self._transport.device).on():
            logits = last.logits(hidden[:, index : index + 1])
        whole: Tensor = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return whole[:, owner].to(self._executors.wide).contiguous()

    def _to_all(self, logits: Tensor | None, rows: int) -> Tensor:
        """From where the last stage is, which alone knows the vocabulary."""
        source, device = self._plan.last_rank, self._transport.device
        width = torch.tensor(0 if logits is None else logits.shape[1], device=device)
        vocabulary = int(self._transport.broadcast(width, source, "the size of the vocabulary"))
        if logits is None:
            logits = torch.empty(rows, vocabulary, dtype=self._executors.wide, device=device)
        return self._transport.broadcast(logits, source, "the logits")
