"""How a Hugging Face model is split: what a user says beside transformers' own arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from terapipe import api
from terapipe.hf import Decoder, split_layers
from terapipe.planning.layout import Layout
from terapipe.planning.order import ORDERS
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan
from terapipe.search.result import PlanResult

NOMINAL = 64  # tokens of a slice in a plan that is made before any batch is known; only proportions matter


@dataclass(frozen=True)
class PipelineConfig:
    """How to split a model and its sequences.

    - ``slices``: number of slices of each sequence, of equal length.
    - ``plan``: a plan or a result of ``terapipe.plan`` in place of ``slices``; ``"auto"`` profiles the model and plans,
      for batches of ``seq_len`` tokens within ``memory`` per device. Batches of other shapes are cut in proportion.
    - ``dp``, ``pp``, ``tp``: replicas, pipeline ranks and tensor parallel ranks. By default all processes that torchrun
      started form one pipeline.
    - ``microbatch_size``: sequences per microbatch; by default all of a batch on one device, one in a pipeline.
    - ``recompute``: "none", "block" or "full", see ``Plan``; by default full with ``gradient_checkpointing=True``
      of transformers, else none.
    - ``order``: a key of ``ORDERS``. Losses other than cross-entropy need one with all forwards first.
    - ``shard``: replicas share out parameters and the optimizer's state (FSDP2).
    - ``timeout``: the longest that a rank waits for another, in seconds; by default ``ddp_timeout`` of transformers, as
      the first rank writes files and generates text while others wait.
    """

    slices: int | None = None
    plan: "Plan | PlanResult | Literal['auto'] | None" = None
    dp: int = 1
    pp: int | None = None
    tp: int = 1
    microbatch_size: int | None = None
    recompute: Recompute | None = None
    order: str = "terapipe"
    shard: bool = False
    memory: str | int | None = None
    seq_len: int | None = None
    profile_seconds: float = 20.0
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.slices is not None and self.plan is not None:
            raise ValueError("slices and plan both say how to cut sequences; give one of them")
        if self.slices is not None and self.slices < 1:
            raise ValueError(f"slices must be at least 1, got {self.slices}")
        if self.order not in ORDERS:
            raise ValueError(f"order is one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.plan != "auto" and (self.memory, self.seq_len) != (None, None):
            raise ValueError("memory and seq_len are what to plan for; they need plan='auto'")
        said = {"microbatch_size": self.microbatch_size, "recompute": self.recompute, "pp": self.pp}
        if isinstance(self.plan, PlanResult):
            said |= {"dp": self.dp > 1, "tp": self.tp > 1, "shard": self.shard}
        twice = [name for name, value in said.items() if value]
        if isinstance(self.plan, Plan | PlanResult) and twice:
            raise ValueError(f"the plan says {' and '.join(twice)} already; leave them out, or change the plan")

    def layout(self, processes: int) -> Layout:
        """Of all processes."""
        pp = self.pp
        if isinstance(self.plan, Plan):
            pp = self.plan.num_ranks
        pp = pp or max(1, processes // (self.dp * self.tp))
        found = self.plan.layout if isinstance(self.plan, PlanResult) else Layout(self.dp, pp, self.tp, self.shard)
        if found.devices != processes:
            raise ValueError(
                f"{found} needs {found.devices} processes, got {processes}; start so many with torchrun, or change the "
                "layout"
            )
        return found

    def plan_for(
        self, decoder: Decoder, layout: Layout, batch_size: int, seq_len: int | None, recompute: Recompute
    ) -> Plan:
        """For batches of so many sequences. ``seq_len`` and ``recompute`` are for what this does not say itself."""
        if isinstance(self.plan, Plan | PlanResult):
            return self.plan if isinstance(self.plan, Plan) else self.plan.plan
        recompute = self.recompute or recompute
        if self.plan == "auto":
            return self._planned(decoder, layout, batch_size, self.seq_len or seq_len, recompute)
        slices = self.slices or max(8, 4 * layout.pp)
        size = self.microbatch_size or (batch_size if layout.pp == 1 else 1)
        chunks = ORDERS[self.order].chunks or 1
        return Plan.uniform(
            batch_size=batch_size, seq_len=slices * max(NOMINAL, decoder.min_slice), num_slices=slices,
            microbatch_size=min(size, batch_size), boundaries=split_layers(decoder, layout.pp * chunks),
            order=self.order, chunks=chunks, recompute=recompute,
        )  # fmt: skip

    def _planned(
        self, decoder: Decoder, layout: Layout, batch_size: int, seq_len: int | None, recompute: Recompute
    ) -> Plan:
        if seq_len is None:
            raise ValueError("plan='auto' must know how long sequences are; give PipelineConfig(seq_len=...)")
        sizes: Sequence[int] = (self.microbatch_size or (batch_size if layout.pp == 1 else 1),)
        profile = api.profile(decoder, seq_len=seq_len, microbatch_sizes=sizes, seconds=self.profile_seconds)
        found = api.plan(
            decoder, profile, batch_size=batch_size * layout.dp, seq_len=seq_len, memory=self.memory, dp=layout.dp,
            pp=layout.pp, tp=layout.tp, shard=layout.shard, order=self.order, microbatch_size=sizes[0],
            recompute=self.recompute or (None if self.memory is not None else recompute),
        )  # fmt: skip
        return found.plan
