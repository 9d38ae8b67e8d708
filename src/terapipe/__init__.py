"""Token-level pipeline parallelism: train long sequences across many devices, exactly.

    import terapipe as tp

    profile = tp.profile(model, seq_len=8192)                              measure, on every rank
    result = tp.plan(model, profile, batch_size=8, seq_len=8192)           choose how to cut model and batch
    pipe = tp.Pipeline(model, result.plan)                                 an nn.Module with this rank's layers
    optimizer = torch.optim.AdamW(pipe.parameters())
    loss = pipe.step(ids, tp.next_token_labels(ids))                       forward and backward of one batch
    optimizer.step()

What is here, by the question it answers:

    what do I train?        PipelineModel, Stage, SliceCache, attend, AuxiliaryLoss for a model of your own; GPT; hf
    is it exact?            verify, Verification; ``terapipe verify`` for Hugging Face models
    how long does it take?  profile, Profile (measured); Cluster (data sheets), calibrate; CostTable (your own)
    how should it be cut?   plan, longest, compare, estimate -> PlanResult, Comparison, PlanEstimate; Plan, Layout
    is a pipeline right?    compare -> Rival (DDP, FSDP2, ...); which cluster? compare_clusters -> ClusterComparison
    in which order?         ORDERS, Order, register; schedule, Schedule, Action, Op, dependencies, validate
    what does a step do?    simulate -> Timeline, Event; dry_run -> DryRun
    run it                  Pipeline, PipelineError, device_mesh, next_token_labels, fill_batch
    packed documents        document_planner, DocumentPlanner
    with a trainer          ``tp.trainers``; objectives: ``tp.losses``

Importing this module never loads torch, because planning, simulating and drawing do not need it and torch takes seconds
to load. The names that need it are loaded when first used (``__getattr__``); type checkers see them all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from terapipe.api import (
    calibrate,
    compare,
    compare_clusters,
    document_planner,
    dry_run,
    estimate,
    longest,
    plan,
    profile,
    simulate,
    verify,
)
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
from terapipe.search.result import ClusterComparison, Comparison, PlanResult
from terapipe.search.rivals import Rival
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
    "ClusterComparison",
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
    "Rival",
    "Schedule",
    "Slice",
    "SliceCache",
    "Stage",
    "Timeline",
    "Verification",
    "attend",
    "balance",
    "calibrate",
    "compare",
    "compare_clusters",
    "dependencies",
    "device_mesh",
    "document_planner",
    "dry_run",
    "estimate",
    "fill_batch",
    "longest",
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
    """Loads names that need torch, and the rooms ``hf``, ``losses`` and ``trainers``, when they are first used.

    Args:
        name: Of an attribute that is not here yet.
    """
    if name in ("hf", "losses", "trainers"):
        return import_module(f"terapipe.{name}")
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'terapipe' has no attribute {name!r}")
    return getattr(import_module(_NEEDS_TORCH[name]), name)


def __dir__() -> list[str]:
    """The public names, also those that are not loaded yet, for completion in editors and notebooks."""
    return sorted([*__all__, "__version__", "hf", "losses", "trainers"])
