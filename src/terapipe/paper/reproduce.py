"""The published experiments, simulated: GPipe against slices along tokens, in the published layouts."""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from terapipe.paper.published import SETTINGS, SWEEP, SWEPT, TOKENS, Setting
from terapipe.planning.hardware import Cluster
from terapipe.presets import PRESETS
from terapipe.search.choose import choose
from terapipe.search.cuts import uniform
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource

UNLIMITED = 1 << 62  # the paper has no memory limit


@dataclass(frozen=True)
class Row:
    """One setting, simulated."""

    setting: Setting
    without: PlanEstimate
    sliced: PlanEstimate
    scheme: PlanEstimate | None  # the published slices, under the same costs

    @property
    def speedup(self) -> float:
        return self.without.step_time / self.sliced.step_time

    @property
    def errors(self) -> tuple[float, float, float]:
        """Relative errors of the step without slices, with slices, and of the speed-up."""
        s = self.setting
        pairs = ((self.without.step_time, s.without), (self.sliced.step_time, s.sliced), (self.speedup, s.speedup))
        without, sliced, speedup = (ours / theirs - 1 for ours, theirs in pairs)
        return without, sliced, speedup

    def to_dict(self) -> dict[str, Any]:
        s = self.setting
        return {
            "id": s.number,
            "model": s.model,
            "without": {"published": s.without, "simulated": self.without.step_time},
            "with": {"published": s.sliced, "simulated": self.sliced.step_time},
            "speedup": {"published": s.speedup, "simulated": self.speedup},
            "published_scheme": None if self.scheme is None else self.scheme.step_time,
            "microbatches": list(self.sliced.plan.sizes),
            "slices": [list(row) for row in self.sliced.plan.lengths],
        }


def source_of(setting: Setting) -> ClusterSource:
    """Without embedding and head, as the paper's timings are."""
    return ClusterSource(PRESETS[setting.model], Cluster(f"p3.16xlarge:{setting.hosts}"), ends=False)


def request_of(setting: Setting) -> Request:
    layout = setting.layout
    return Request(
        batch_size=setting.batch_size,
        seq_len=TOKENS,
        dp=layout.dp,
        pp=layout.pp,
        tp=layout.tp,
        recompute=False,
        budget=UNLIMITED,
    )


def evaluator_of(setting: Setting) -> PlanEvaluator:
    return PlanEvaluator(source_of(setting), request_of(setting), setting.layout, recompute=False)


def row(setting: Setting) -> Row:
    """GPipe with microbatches of one sequence, and the planner's slices in the paper's order, one chunk per rank."""
    evaluator = evaluator_of(setting)
    whole = evaluator.evaluate(evaluator.plan("gpipe", 1, (TOKENS,)))
    sliced = choose(evaluator.source, request_of(setting).fixed(order="terapipe", chunks=1)).estimate
    scheme = evaluator.evaluate(evaluator.plan("terapipe", 1, setting.scheme)) if setting.scheme else None
    return Row(setting, whole, sliced, scheme)


def rows() -> list[Row]:
    return [row(setting) for setting in SETTINGS]


def sweep(planned: float) -> list[dict[str, Any]]:
    """Step times of setting 9 by number of equal slices, and with the planner's slices."""
    setting = SETTINGS[SWEPT - 1]
    evaluator = evaluator_of(setting)
    points: list[dict[str, Any]] = [
        {
            "slices": count,
            "published": published,
            "simulated": evaluator.evaluate(evaluator.plan("terapipe", 1, uniform(TOKENS, count, 1))).step_time,
        }
        for count, published in SWEEP.items()
    ]
    return [*points, {"slices": "planned", "published": setting.sliced, "simulated": planned}]


def mean_error(found: list[Row]) -> float:
    """The mean absolute error of all step times, with and without slices."""
    return fmean(abs(error) for r in found for error in r.errors[:2])
