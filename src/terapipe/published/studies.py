"""What the TeraPipe paper leaves open: other orders in its settings, and newer models and clusters."""

from dataclasses import dataclass
from functools import cache
from typing import Self

from terapipe.planning.hardware import Cluster
from terapipe.planning.presets import PRESETS
from terapipe.published.simulation import Setup, Simulation
from terapipe.published.table import Table
from terapipe.search.choose import compare, pick
from terapipe.search.evaluator import PlanEstimate
from terapipe.search.request import Request
from terapipe.search.rivals import Rival, rivals
from terapipe.search.source import ClusterSource

GROWTH = (1, 2, 4, 8, 16)  # times the published batch


@dataclass(frozen=True)
class Setting:
    """One of the paper's ten settings: model, hosts and batch. Its layout is left to the planner here.

    Attributes:
        name: As in the published table.
        source: The model without embedding and head, as the paper's timings are, and its cluster.
        batch_size: Sequences in a step.
        seq_len: Tokens of each.
    """

    name: str
    source: ClusterSource
    batch_size: int
    seq_len: int

    @classmethod
    @cache
    def all(cls) -> tuple[Self, ...]:
        """The settings (1) to (10)."""
        table = Table.load("terapipe")
        setups = [(row["name"], Setup.of({**table.setup, **row["setup"]})) for row in table.rows]
        return tuple(cls(name, Simulation(s).source, s.batch_size, s.seq_len) for name, s in setups)


def orders(setting: Setting, growth: int = 1) -> list[PlanEstimate]:
    """The best plan of every order on the published hosts, each in its own best layout, within what is usable of a
    V100's memory and with recomputation allowed.

    GPipe needs much memory, which 1F1B avoids. This study answers whether 1F1B, slices, or both together are best.

    Args:
        setting: Of the paper.
        growth: How many times the published batch.
    """
    return compare(setting.source, Request(setting.batch_size * growth, setting.seq_len))


def largest_throughput(setting: Setting) -> dict[str, PlanEstimate]:
    """For each order its highest throughput with batches of 1 to 16 times the published size, of plans that fit.

    Args:
        setting: Of the paper.
    """
    best: dict[str, PlanEstimate] = {}
    for growth in GROWTH:
        for choice in orders(setting, growth):
            rival = best.get(choice.title)
            if choice.fits and (rival is None or choice.tokens_per_second > rival.tokens_per_second):
                best[choice.title] = choice
    return best


@dataclass(frozen=True)
class Case:
    """A model on a cluster that the paper does not have.

    Attributes:
        model: The name of a preset.
        where: A cluster, as ``HOST:COUNT``.
        batch_size: Sequences in a step.
        seq_len: Tokens of each.
    """

    model: str
    where: str
    batch_size: int
    seq_len: int

    @property
    def source(self) -> ClusterSource:
        """Model and cluster."""
        return ClusterSource(PRESETS[self.model], Cluster(self.where))


CASES = (
    Case("llama3-8b", "dgx-a100:1", 8, 8192),
    Case("llama3-8b", "dgx-h100:1", 1, 131072),
    Case("llama3-8b", "dgx-h100:8", 1, 1048576),
    Case("llama3-70b", "dgx-a100:8", 16, 8192),
    Case("llama3-70b", "dgx-h100:8", 4, 32768),
    Case("llama3-70b", "dgx-h100:8", 8, 32768),
    Case("llama3-70b", "dgx-h100:16", 1, 131072),
    Case("llama3-405b", "dgx-h100:64", 64, 8192),
    Case("llama3-405b", "dgx-h100:64", 4, 131072),
    Case("llama3-405b", "dgx-h100:512", 512, 8192),
)


@dataclass(frozen=True)
class Outcome:
    """A case, planned, beside what there is without slices. All of them are in their own best layouts.

    Attributes:
        case: The model, the cluster and the batch.
        planned: The planner's choice.
        whole: The fastest of all orders with whole sequences; None if none fits.
        best_1f1b: The fastest 1F1B; None if none fits.
        rival: The fastest way to train without a pipeline, by estimate; None if none fits.
    """

    case: Case
    planned: PlanEstimate
    whole: PlanEstimate | None
    best_1f1b: PlanEstimate | None
    rival: Rival | None


def outcome(case: Case) -> Outcome:
    """Plans one case, and compares the plan with what there is without slices.

    Args:
        case: The model, the cluster and the batch.
    """
    request = Request(case.batch_size, case.seq_len)
    rows = [row for row in compare(case.source, request) if row.fits]
    whole = min((row for row in rows if not row.sliced), key=lambda row: row.step_time, default=None)
    best_1f1b = next((row for row in rows if row.name == "1f1b"), None)
    others = (rival for rival in rivals(case.source, request) if rival.fits)
    return Outcome(case, pick(rows), whole, best_1f1b, min(others, key=lambda rival: rival.step_time, default=None))
