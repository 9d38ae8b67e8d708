"""Evaluation with the training pipeline: loss, perplexity and a sample of generated text.

The same stages, plan and slices as in training are used, without gradients, so nothing is built or moved for it. The
batches are the same each time, so that losses of two steps can be compared.
"""

import math
from typing import Any

import torch
from torch import Tensor

from terapipe.runtime import Pipeline
from terapipe.training.data.loader import BatchLoader
from terapipe.training.logging.display import RunLog
from terapipe.training.state import RunContext

PROMPT = 32  # tokens, if the configuration has no prompt
CONTEXT = 256  # last tokens that the next one is predicted from


class Evaluator:
    """Evaluates the model of a pipeline. All ranks make one and call it together.

    Args:
        context: The run: its data, objective and settings.
        pipe: Evaluated as it is at the moment.
        log: Takes a row with the result.
    """

    def __init__(self, context: RunContext, pipe: Pipeline, log: RunLog) -> None:
        config, data, objective = context.config, context.data, context.objective
        self._config, self._pipe, self._data, self._log = config.evaluation, pipe, data, log
        self._objective = objective
        self._loader: BatchLoader | None = None
        if data.eval:
            whole = objective.is_of_sequences  # a sequence that was filled up would count
            self._loader = BatchLoader(data.eval, config.data, pipe, shuffle=False, rows=objective.rows, whole=whole)
            self._loader.refuse_too_few()
        self._total: float | None = None

    def run(self, step: int) -> float | None:
        """Evaluates, generates a sample, and writes a row for each.

        Args:
            step: For the rows; also the seed of the sample, so that a repeated step gives the same text.

        Returns:
            The mean loss, the same on all ranks; None if there is no evaluation data.
        """
        self._pipe.eval()
        loss = None if self._loader is None else self._loss(self._loader)
        if loss is not None:
            row: dict[str, Any] = {"step": step, "eval_loss": loss}
            if self._objective.loss_fn is None:
                row["perplexity"] = math.exp(loss) if loss < 700 else math.inf
            self._log.row(row)
        if self._config.sample:
            self._log.row({"step": step, "sample": self._sample(step)})
        self._pipe.train()
        return loss

    def _loss(self, loader: BatchLoader) -> float:
        """The mean over all labels of all batches. The labels are counted once, because the batches are always the
        same."""
        assert self._data.eval is not None
        if self._total is None:  # the batches are always the same
            self._total = self._objective.total(loader, loader.once(self._config.batches))
        losses = []
        for batch in loader.once(self._config.batches):
            targets = self._objective.targets(batch, self._data.eval)
            losses.append(self._pipe.evaluate(batch.ids, targets, batch.documents, total=self._total).double())
        return float(sum(losses))

    def _sample(self, seed: int) -> str:
        """The prompt and what the model writes after it, as text."""
        config, tokenizer = self._config, self._data.tokenizer
        if config.prompt:
            ids = tokenizer.encode([config.prompt])[0]
        else:
            ids = (self._data.eval or self._data.train).tokens[:PROMPT].tolist()
        return tokenizer.decode(ids + self._generate(ids, seed))

    @torch.no_grad()
    def _generate(self, prompt: list[int], seed: int) -> list[int]:
        """The tokens after the prompt, up to the end token. The same on all ranks, which call it together.

        Each token takes a whole forward pass over the last CONTEXT tokens: there is no cache from one to the next. For
        a sample of a few hundred tokens every hundred steps that is cheap enough, and needs no code beside that of
        training.
        """
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        while len(ids) < self._config.sample and ids[-1:] != [self._data.tokenizer.end]:
            context = torch.tensor([(prompt + ids)[-CONTEXT:]])
            logits = self._pipe.next_token_logits(context)[0].float().cpu()
            ids.append(_next_token(logits, self._config.temperature, generator))
        return ids


def _next_token(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draws a token. All ranks draw with the same seed from the same logits, so nobody has to send it."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator))
