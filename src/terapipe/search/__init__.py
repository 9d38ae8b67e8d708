"""The planner: chooses layout, order, slices and recomputation for a model within a memory budget. No torch here."""

from terapipe.search.bounds import Work
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator, pareto_front
from terapipe.search.request import Request, layouts
from terapipe.search.result import ClusterComparison, Comparison, PlanResult
from terapipe.search.rivals import Rival, rivals
from terapipe.search.sensitivity import Sensitivity, sensitivities
from terapipe.search.source import ClusterSource, ProfileSource, Source
from terapipe.search.table import CostTable, choose_by_table

__all__ = [
    "ClusterComparison",
    "ClusterSource",
    "Comparison",
    "CostTable",
    "PlanEstimate",
    "PlanEvaluator",
    "PlanResult",
    "ProfileSource",
    "Request",
    "Rival",
    "Sensitivity",
    "Source",
    "Work",
    "choose_by_table",
    "layouts",
    "pareto_front",
    "rivals",
    "sensitivities",
]
