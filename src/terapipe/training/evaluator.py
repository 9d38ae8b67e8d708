"""Evaluation through the pipeline that trains: loss, perplexity, a few words."""

import math

from terapipe.config import RunConfig
from terapipe.runtime.pipeline import Pipeline
from terapipe.training.data.loader import Feed
from terapipe.training.data.token_file import Data
from terapipe.training.generate import continued
from terapipe.training.logging.journal import Journal

PROMPT = 32  # tokens, where no prompt is given


class Evaluator:
    def __init__(self, config: RunConfig, pipe: Pipeline, data: Data, journal: Journal) -> None:
        self._config, self._pipe, self._data, self._journal = config.evaluation, pipe, data, journal
        self._feed = Feed(data.eval, config.data, pipe, shuffle=False) if data.eval else None
        self._total: int | None = None

    def run(self, step: int) -> float | None:
        """The loss, if there are data for it. All ranks together."""
        self._pipe.eval()
        loss = None if self._feed is None else self._loss(self._feed)
        if loss is not None:
            perplexity = math.exp(loss) if loss < 700 else math.inf
            self._journal.row({"step": step, "eval_loss": loss, "perplexity": perplexity})
        if self._config.sample:
            self._journal.row({"step": step, "sample": self._sample(step)})
        self._pipe.train()
        return loss

    def _loss(self, feed: Feed) -> float:
        if self._total is None:  # always of the same batches
            self._total = feed.count(feed.once(self._config.batches))
        batches = feed.once(self._config.batches)
        losses = [self._pipe.evaluate(*given, total=self._total).double() for given in batches]
        return float(sum(losses))

    def _sample(self, step: int) -> str:
        wanted, tokenizer = self._config, self._data.tokenizer
        if wanted.prompt:
            prompt = tokenizer.encode([wanted.prompt])[0]
        else:
            prompt = (self._data.eval or self._data.train).tokens[:PROMPT].tolist()
        return tokenizer.decode(
            prompt + continued(self._pipe, prompt, wanted.sample, wanted.temperature, step, tokenizer.end)
        )
