"""Token-level pipeline parallelism: train long sequences across many devices, exactly.

Importing this module never loads torch; the names that need it are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from terapipe.api import compare, document_planner, dry_run, estimate, plan, profile, simulate, verify
from terapipe.planning.documents import DocumentPlanner
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout, balance, split_layers
from terapipe.planning.order import ORDERS, Order, register
from terapipe.planning.presets import PRESETS, GPTConfig, ModelSpec
from terapipe.planning.profile import Profile
from terapipe.planning.slices import Plan, Slice
from terapipe.scheduling.actions import Action, Op, Schedule, dependencies
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.timeline import Event, Timeline
from terapipe.scheduling.validation import validate
from terapipe.search.evaluator import PlanEstimate
from terapipe.search.result import Comparison, PlanResult
from terapipe.search.table import CostTable

if TYPE_CHECKING:
    from terapipe.modeling.attention import attend
    from terapipe.modeling.gpt import GPT
    from terapipe.modeling.slice_cache import SliceCache
    from terapipe.modeling.stage import AuxiliaryLoss, PipelineModel, Stage, fill_batch, next_token_labels
    from terapipe.modeling.verification import Verification
    from terapipe.runtime.comm.errors import PipelineError
    from terapipe.runtime.comm.mesh import device_mesh
    from terapipe.runtime.dry_run import DryRun
    from terapipe.runtime.pipeline import Pipeline

__version__ = "0.1.0"

_NEEDS_TORCH = {
    "AuxiliaryLoss": "terapipe.modeling.stage",
    "DryRun": "terapipe.runtime.dry_run",
    "GPT": "terapipe.modeling.gpt",
    "Pipeline": "terapipe.runtime.pipeline",
    "PipelineError": "terapipe.runtime.comm.errors",
    "PipelineModel": "terapipe.modeling.stage",
    "SliceCache": "terapipe.modeling.slice_cache",
    "Stage": "terapipe.modeling.stage",
    "fill_batch": "terapipe.modeling.stage",
    "device_mesh": "terapipe.runtime.comm.mesh",
    "Verification": "terapipe.modeling.verification",
    "attend": "terapipe.modeling.attention",
    "next_token_labels": "terapipe.modeling.stage",
}

__all__ = [
    "GPT",
    "ORDERS",
    "PRESETS",
    "Action",
    "AuxiliaryLoss",
    "Cluster",
    "Comparison",
    "CostTable",
    "DocumentPlanner",
    "DryRun",
    "Event",
    "GPTConfig",
    "Layout",
    "ModelSpec",
    "Op",
    "Order",
    "Pipeline",
    "PipelineError",
    "PipelineModel",
    "Plan",
    "PlanEstimate",
    "PlanResult",
    "Profile",
    "Schedule",
    "Slice",
    "SliceCache",
    "Stage",
    "Timeline",
    "Verification",
    "attend",
    "balance",
    "compare",
    "dependencies",
    "device_mesh",
    "document_planner",
    "dry_run",
    "estimate",
    "fill_batch",
    "next_token_labels",
    "plan",
    "profile",
    "register",
    "schedule",
    "simulate",
    "split_layers",
    "validate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("hf", "losses", "trainers"):
        return import_module(f"terapipe.{name}")
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'terapipe' has no attribute {name!r}")
    return getattr(import_module(_NEEDS_TORCH[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "hf", "losses", "trainers"])
