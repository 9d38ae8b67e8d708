"""How a Hugging Face model is split: what a user says beside transformers' own arguments."""

from dataclasses import dataclass
from typing import Literal

from terapipe import api
from terapipe.hf import Decoder, split_layers
from terapipe.planning.layout import Layout
from terapipe.planning.limits import check_whole_number
from terapipe.planning.optimizer_state import OPTIMIZERS
from terapipe.planning.options import PlanOptions, values_of, with_default
from terapipe.planning.order import ORDERS
from terapipe.planning.presets import ModelSpec
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.search.result import PlanResult

NOMINAL = 64  # tokens of a slice in a plan that is made before any batch is known; only proportions matter
# Knobs that mean something without a planner. All others are limits on what it chooses, and need plan="auto".
WITHOUT_PLANNER = ("dp", "pp", "tp", "shard", "order", "num_slices", "microbatch_size", "chunks", "recompute")


@dataclass(frozen=True)
class PipelineConfig(PlanOptions):
    """How to split a model and its sequences: every knob of ``terapipe.plan``, and what a trainer needs beside them.

    By default all processes that torchrun started form one pipeline, in the order ``terapipe``. Losses other than
    cross-entropy need an order with all forwards first. ``microbatch_size`` is by default all of a batch on one device,
    and one sequence in a pipeline; ``recompute`` is full with ``gradient_checkpointing=True`` of transformers, else
    none.

    Args:
        slices: Number of slices of each sequence, of equal length: short for ``num_slices``, here only.
        plan: A plan or a result of ``terapipe.plan`` in place of ``slices``; ``"auto"`` profiles the model and plans,
            for batches of ``seq_len`` tokens within ``memory`` per device. Batches of other shapes are cut in
            proportion. Without it, ``memory`` on one device plans each shape of batch when it first comes, without
            measurements, and holds the plan against a dry run: see budget.py.
        seq_len: Tokens per sequence to plan for, with ``plan="auto"`` or ``memory``.
        profile_seconds: About how long ``plan="auto"`` measures the model, at most.
        optimizer: Whose state counts within ``memory``: ``"adamw"``, ``"adamw-8bit"``, ``"adamw-offload"`` or
            ``"sgd"``. By default what ``optim`` of ``TrainingArguments`` says, else AdamW.
        timeout: The longest that a rank waits for another, in seconds; by default ``ddp_timeout`` of transformers, as
            the first rank writes files and generates text while others wait.
    """

    slices: int | None = None
    plan: "Plan | PlanResult | Literal['auto'] | None" = None
    seq_len: int | None = None
    profile_seconds: float = 20.0
    optimizer: str | None = None
    timeout: float | None = None
    dp: int = with_default("dp", 1)
    tp: int = with_default("tp", 1)
    shard: bool = with_default("shard", False)
    order: str = with_default("order", "terapipe")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slices is not None:
            check_whole_number("slices", self.slices)
            if self.num_slices is not None:
                raise ValueError(f"slices is short for num_slices; give one, got {self.slices} and {self.num_slices}")
        if (self.slices or self.num_slices) and self.plan is not None:
            raise ValueError("slices and plan both say how to cut sequences; give one of them")
        limits = {"seq_len": self.seq_len, **values_of(self, PlanOptions)}
        limits = {name: value for name, value in limits.items() if value and name not in WITHOUT_PLANNER}
        if self.plan != "auto" and limits and not self.plans_each_batch:
            raise ValueError(
                f"{' and '.join(limits)} say what to plan for; they need plan='auto', or on one device memory=..."
            )
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        self._refuse_twice()

    @property
    def plans_each_batch(self) -> bool:
        """Whether plans are made for batches as they come, within ``memory``."""
        return self.plan is None and self.memory is not None

    def _refuse_twice(self) -> None:
        """Refuses knobs beside a plan that fixes them."""
        said = {"microbatch_size": self.microbatch_size, "recompute": self.recompute, "pp": self.pp}
        said["chunks"] = self.chunks
        if isinstance(self.plan, PlanResult):
            said |= {"dp": self.dp > 1, "tp": self.tp > 1, "shard": self.shard}
        twice = [name for name, value in said.items() if value]
        if isinstance(self.plan, Plan | PlanResult) and twice:
            raise ValueError(f"the plan says {' and '.join(twice)} already; leave them out, or change the plan")

    def layout(self, processes: int) -> Layout:
        """How replicas, stages and tensor-parallel ranks share the processes.

        Args:
            processes: That torchrun started; 1 without it.

        Raises:
            ValueError: ``dp``, ``pp`` and ``tp``, or the plan, need another number.
        """
        pp = self.pp
        if isinstance(self.plan, Plan):
            pp = self.plan.num_ranks
        pp = pp or max(1, processes // (self.dp * self.tp))
        layout = self.plan.layout if isinstance(self.plan, PlanResult) else Layout(self.dp, pp, self.tp, self.shard)
        if layout.devices != processes:
            raise ValueError(
                f"{layout} needs {layout.devices} processes, got {processes}; start so many with torchrun, or change "
                "the layout"
            )
        if self.plans_each_batch and layout.devices > 1:
            raise ValueError(
                f"memory={self.memory!r} alone plans for one device, got {layout}; with several, give plan='auto' and "
                "seq_len, too"
            )
        return layout

    def plan_for(
        self,
        decoder: Decoder,
        layout: Layout,
        batch_size: int,
        seq_len: int | None,
        recompute: Recompute,
        *,
        compiled: bool = False,
    ) -> Plan:
        """The plan of one replica.

        Args:
            decoder: The model.
            layout: As ``layout`` returned it.
            batch_size: Sequences per batch of a replica.
            seq_len: Tokens per sequence, if this does not say it itself.
            recompute: What the backward computes again, if this does not say it itself.
            compiled: Whether layers will be compiled.
        """
        if isinstance(self.plan, Plan | PlanResult):
            return self.plan if isinstance(self.plan, Plan) else self.plan.plan
        recompute = self.recompute or recompute
        if self.plan == "auto":
            seq_len = self.seq_len or seq_len
            return self._choose(decoder, layout, batch_size, seq_len, recompute, compiled=compiled)
        slices = self.slices or self.num_slices or max(8, 4 * layout.pp)
        size = self.microbatch_size or (batch_size if layout.pp == 1 else 1)
        chunks = self.chunks or ORDERS[self.order].chunks or 1
        return Plan.uniform(
            batch_size=batch_size, seq_len=slices * max(NOMINAL, decoder.min_slice), num_slices=slices,
            microbatch_size=min(size, batch_size), boundaries=split_layers(decoder, layout.pp * chunks),
            order=self.order, chunks=chunks, recompute=recompute,
        )  # fmt: skip

    def _choose(
        self,
        decoder: Decoder,
        layout: Layout,
        batch_size: int,
        seq_len: int | None,
        recompute: Recompute,
        *,
        compiled: bool,
    ) -> Plan:
        """Measures the model, and chooses by all knobs."""
        if seq_len is None:
            raise ValueError("plan='auto' must know how long sequences are; give PipelineConfig(seq_len=...)")
        size = self.microbatch_size or (batch_size if layout.pp == 1 else 1)
        profile = api.profile(decoder, seq_len=seq_len, microbatch_sizes=(size,), seconds=self.profile_seconds)
        options = values_of(self, PlanOptions) | values_of(layout, Layout) | {"microbatch_size": size}
        if self.recompute is None and self.memory is None:
            options["recompute"] = recompute
        options["optimizer"] = self.optimizer
        spec = spec_of(decoder, compiled=compiled)
        return api.plan(spec, profile, batch_size=batch_size * layout.dp, seq_len=seq_len, **options).plan


def spec_of(decoder: Decoder, *, compiled: bool) -> ModelSpec:
    """What the planner must know about a model.

    Args:
        decoder: The model.
        compiled: Whether its layers will be compiled.
    """
    spec = decoder.planning_spec()
    return spec.compiled() if compiled else spec
