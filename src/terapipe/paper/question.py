"""The open question: GPipe's weakness is memory, and 1F1B cures that. Is it better than slicing? And both together?"""

from terapipe.paper.published import Setting
from terapipe.paper.reproduce import request_of, source_of
from terapipe.search.compare import compare
from terapipe.search.evaluator import PlanEstimate

GROWTH = (1, 2, 4, 8, 16)


def orders(setting: Setting, growth: int = 1) -> list[PlanEstimate]:
    """Every order at its best in the published layout, within a V100's memory, recomputing where that pays."""
    request = request_of(setting).fixed(batch_size=setting.batch_size * growth, budget=None, recompute=None)
    return compare(source_of(setting), request)


def grown(setting: Setting) -> dict[str, PlanEstimate]:
    """For each order the highest throughput over batches up to sixteen times the published one, of what fits."""
    best: dict[str, PlanEstimate] = {}
    for growth in GROWTH:
        for choice in orders(setting, growth):
            known = best.get(choice.name)
            if choice.fits and (known is None or choice.tokens_per_second > known.tokens_per_second):
                best[choice.name] = choice
    return best
