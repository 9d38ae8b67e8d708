"""Studies beyond the paper: every order in its settings, larger batches, modern models on modern clusters."""

from dataclasses import dataclass, replace

from terapipe.paper.estimates import Estimate, estimates
from terapipe.paper.published import Setting
from terapipe.paper.reproduce import request_of, source_of
from terapipe.planning.hardware import Cluster
from terapipe.presets import PRESETS
from terapipe.search.choose import choose
from terapipe.search.compare import compare
from terapipe.search.evaluator import PlanEstimate
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource

GROWTH = (1, 2, 4, 8, 16)


def orders(setting: Setting, growth: int = 1) -> list[PlanEstimate]:
    """The best plan of every order in the published layout, within a V100's memory and with recomputation allowed.

    GPipe needs much memory, which 1F1B avoids. This study answers whether 1F1B, slices, or both together are best.
    """
    request = request_of(setting).fixed(batch_size=setting.batch_size * growth, budget=None, recompute=None)
    return compare(source_of(setting), request)


def largest_throughput(setting: Setting) -> dict[str, PlanEstimate]:
    """For each order its highest throughput with batches of 1 to 16 times the published size, of plans that fit."""
    best: dict[str, PlanEstimate] = {}
    for growth in GROWTH:
        for choice in orders(setting, growth):
            known = best.get(choice.name)
            if choice.fits and (known is None or choice.tokens_per_second > known.tokens_per_second):
                best[choice.name] = choice
    return best


@dataclass(frozen=True)
class Case:
    """A model on a cluster that the paper does not have."""

    model: str
    where: str
    batch_size: int
    seq_len: int

    @property
    def source(self) -> ClusterSource:
        config = PRESETS[self.model]
        return ClusterSource(replace(config, max_seq_len=max(config.max_seq_len, self.seq_len)), Cluster(self.where))


CASES = (
    Case("llama3-8b", "dgx-a100:1", 8, 8192),
    Case("llama3-8b", "dgx-h100:1", 1, 131072),
    Case("llama3-8b", "dgx-h100:8", 1, 1048576),
    Case("llama3-70b", "dgx-a100:8", 16, 8192),
    Case("llama3-70b", "dgx-h100:8", 4, 32768),
    Case("llama3-70b", "dgx-h100:16", 1, 131072),
    Case("llama3-405b", "dgx-h100:64", 64, 8192),
    Case("llama3-405b", "dgx-h100:64", 4, 131072),
    Case("llama3-405b", "dgx-h100:512", 512, 8192),
)


@dataclass(frozen=True)
class Outcome:
    case: Case
    planned: PlanEstimate
    best_1f1b: PlanEstimate | None  # in any layout; None if none fits
    others: list[Estimate]


def outcome(case: Case) -> Outcome:
    request = Request(case.batch_size, case.seq_len, tile=max(8, case.seq_len // 1024))
    planned = choose(case.source, request).estimate
    try:
        best_1f1b = choose(case.source, request.fixed(order="1f1b")).estimate
    except ValueError:
        best_1f1b = None
    return Outcome(case, planned, best_1f1b, estimates(case.source, request))
