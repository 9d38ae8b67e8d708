"""Beyond the paper: modern shapes, long sequences, other clusters. Planned against the usual choices."""

from dataclasses import dataclass, replace

from terapipe.planning.hardware import Cluster
from terapipe.presets import PRESETS
from terapipe.search.choose import choose
from terapipe.search.estimates import Estimate, estimates
from terapipe.search.evaluator import PlanEstimate
from terapipe.search.request import Request
from terapipe.search.result import PlanResult
from terapipe.search.source import ClusterSource


@dataclass(frozen=True)
class Case:
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
    usual: PlanEstimate | None  # the best 1F1B, in any layout, if any fits
    others: list[Estimate]


def outcome(case: Case) -> Outcome:
    request = Request(case.batch_size, case.seq_len, tile=max(8, case.seq_len // 1024))
    decision: PlanResult = choose(case.source, request)
    try:
        usual = choose(case.source, request.fixed(order="1f1b")).estimate
    except ValueError:
        usual = None
    return Outcome(case, decision.estimate, usual, estimates(case.source, request))
