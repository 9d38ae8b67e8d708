"""Plans within a memory budget on one device: slices, recomputation and offload for each shape of batch.

The planner counts bytes by a GPT of the model's size (planning/memory.py). Other architectures, adapters and frozen
weights have other bytes. So the planner's budget is moved by the difference of weights, gradients and optimizer state;
then its plan is counted once more, by a dry run of the model itself on fake tensors, until that is within the budget::

    tp.plan(memory = budget + difference) --dry run--> within the budget? taken
       |    ^                                  |
       |    +--------- too much, by so much ---+
       v nothing fits
    plan that needs least --dry run--> within the budget? taken; else refused, with what is missing

Seconds are those of this device as it is described, not measured: they only rank plans.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from terapipe import api
from terapipe.hf.decoder import Decoder
from terapipe.modeling.kernel_choice import kernel_for
from terapipe.modeling.kernels import KernelRequest
from terapipe.modeling.quantized import bytes_of
from terapipe.modeling.stage import Autocast
from terapipe.planning.cost import StageSpec
from terapipe.planning.hardware import Cluster
from terapipe.planning.layout import Layout
from terapipe.planning.optimizer_state import state_bytes
from terapipe.planning.options import CostOptions, PlanOptions, values_of
from terapipe.planning.order import all_microbatches, order_named
from terapipe.planning.presets import ModelSpec
from terapipe.planning.slices import Plan, even_lengths, microbatch_sizes
from terapipe.runtime.calibration import host_here
from terapipe.runtime.dry_run import dry_run
from terapipe.search.request import Request
from terapipe.trainers.config import PipelineConfig, spec_of

TRIES = 5  # plans that are counted, at most, before the one that needs least is taken
SHORTEST = 64  # tokens of a slice of the plan that needs least: shorter ones save little
MOST_SLICES = 32  # of that plan: a dry run takes as long as it has slices


@dataclass
class BudgetPlanner:
    """Makes the plans of a model on one device within ``memory`` of its configuration.

    A batch is cut by the plan of a shape that is at least as large, and less than twice as long; for others a plan is
    made when they first come.

    Args:
        decoder: The model.
        config: With ``memory``, and what else is fixed.
        device: Where it runs.
        autocast: Under which steps run.
        ready: A context in which the model can be copied and run.
        compiled: Whether its layers will be compiled.
        noisy: Whether noise on embeddings, drawn for whole sequences, waits for their slices.
    """

    decoder: Decoder
    config: PipelineConfig
    device: torch.device
    autocast: Autocast
    ready: Callable[[], AbstractContextManager[None]]
    compiled: bool = False
    noisy: bool = False

    def __post_init__(self) -> None:
        self._plans: dict[tuple[int, int], Plan] = {}
        self._trained = -1
        self._cluster: Cluster | None = None

    def plan_for(self, rows: int, tokens: int) -> Plan:
        """The plan of a batch.

        Args:
            rows: Its sequences.
            tokens: Of each of them.

        Raises:
            ValueError: It does not fit, with how much is missing.
        """
        trained = sum(p.numel() for p in self.decoder.model.parameters() if p.requires_grad)
        if trained != self._trained:  # then gradients and the optimizer's state are others
            self._plans.clear()
            self._trained = trained
        fit = [shape for shape in self._plans if rows <= shape[0] < 2 * rows and tokens <= shape[1] < 2 * tokens]
        if not fit:
            with self.ready(), self.autocast.on():
                self._plans[rows, tokens] = self._choose(rows, tokens)
            return self._plans[rows, tokens]
        return self._plans[min(fit)].resize(rows, tokens)

    def _choose(self, rows: int, tokens: int) -> Plan:
        """The fastest plan whose dry run is within the budget."""
        budget = self.config.budget or 0
        moved = budget + self._excess(rows, tokens)
        for _ in range(TRIES):
            try:
                plan = self._plan_within(moved, rows, tokens)
            except ValueError:
                break
            count = self._count(plan)
            if count <= budget:
                return plan
            moved -= count - budget + budget // 200
        least, count = self._least(rows, tokens)
        if count > budget:
            self._refuse(least, count)
        return least

    def _excess(self, rows: int, tokens: int) -> int:
        """By how many bytes the GPT of the planner has more of weights, gradients and optimizer state."""
        spec, request = self._spec, Request(rows, tokens)
        memory = api.source_of(spec, self._described(), request, CostOptions(**self._casts)).memory(Layout())
        stage = StageSpec(self.decoder.num_layers, first=True, last=True)
        copies = memory.model_state(stage) + memory.gradients(stage).during
        for p in self.decoder.model.parameters():
            bytes_of_trained = max(p.element_size(), 4) + self._state
            copies -= bytes_of(p) + p.numel() * p.requires_grad * bytes_of_trained
        return int(copies)

    def _plan_within(self, memory: int, rows: int, tokens: int) -> Plan:
        """The planner's choice by its own count."""
        config = self.config
        fixed: dict[str, Any] = {"memory": memory, "dp": 1, "pp": 1, "tp": 1, "shard": False}
        fixed["num_slices"] = config.slices or config.num_slices
        fixed["microbatch_size"] = min(config.microbatch_size or rows, rows)
        options = values_of(config, PlanOptions) | fixed | self._casts
        return api.plan(self._spec, self._described(), batch_size=rows, seq_len=tokens, **options).plan

    def _least(self, rows: int, tokens: int) -> tuple[Plan, int]:
        """The plan that needs least memory of those with equal slices, and its bytes."""
        config, modes = self.config, self.decoder.recompute_modes
        count = config.slices or config.num_slices
        shortest = max(SHORTEST, self.decoder.min_slice)
        count = min(count or max(1, min(MOST_SLICES, tokens // shortest)), tokens)
        lengths = tuple(config.slice_lengths or even_lengths(tokens, count))
        sizes = microbatch_sizes(rows, min(config.microbatch_size or rows, rows))
        recompute = config.recompute or modes[-1]
        plan = Plan(sizes, (lengths,) * len(sizes), (0, self.decoder.num_layers), config.order, 1, recompute)
        return min(((one, self._count(one)) for one in self._offloaded_or_not(plan)), key=lambda pair: pair[1])

    def _offloaded_or_not(self, plan: Plan) -> Iterator[Plan]:
        """Where the device is the host, offloaded slices would stay in the same memory."""
        yield plan
        if self.device.type != "cpu" and self.config.offload != "none":
            yield replace(plan, offload=True, offload_kv=self.config.offload_kv is not False)

    def _count(self, plan: Plan) -> int:
        """Bytes of a step on the device, with the optimizer's state, by a dry run."""
        blas = self._described().host.device.blas
        run = dry_run(
            self.decoder, plan, Layout(1, 1, 1), 0, autocast=self.autocast.dtype,
            state=self._state, attention=self._attention, blas=blas, device=torch.device(self.device.type),
            values=order_named(plan.order).in_flight is all_microbatches,
        )  # fmt: skip
        return run.peak + self.noisy * plan.batch_size * plan.seq_len * self.decoder.shape.hidden * self._element

    # What the planner is told of model and device

    @property
    def _spec(self) -> ModelSpec:
        return spec_of(self.decoder, compiled=self.compiled)

    @property
    def _casts(self) -> dict[str, Any]:
        return {"autocast": self.autocast.dtype is not None}

    @property
    def _element(self) -> int:
        """Bytes of a weight."""
        return next(self.decoder.model.parameters()).element_size()

    @property
    def _state(self) -> float:
        """Bytes that the optimizer has on the device for a parameter: torch's, so no copies in float32."""
        return state_bytes(self.config.optimizer or "adamw", self._element, master=False).device

    @property
    def _attention(self) -> str:
        dtype = self.autocast.dtype or next(self.decoder.model.parameters()).dtype
        return kernel_for(KernelRequest(self.device, dtype, self.decoder.shape.head_size)).name

    def _described(self) -> Cluster:
        """This device, with the bytes of this model's numbers."""
        if self._cluster is None:
            host = host_here(None)
            element = self._element if self.autocast.dtype is None else self.autocast.dtype.itemsize
            device = replace(host.device, element=element, state=self._state, attention_kernel=self._attention)
            self._cluster = Cluster("this device", replace(host, device=device, devices=1))
        return self._cluster

    def _refuse(self, least: Plan, count: int) -> None:
        budget = self.config.budget or 0
        moved = ", offloaded" if least.offloads else ""
        raise ValueError(
            f"memory={self.config.memory!r} is too little: a step of {least.batch_size} x {least.seq_len} tokens needs "
            f"at least {_text(count)} ({len(least.lengths[0])} slices, recompute {least.recompute!r}{moved}), "
            f"{_text(count - budget)} more; take fewer or shorter sequences, adapters in place of all "
            "weights, an optimizer with a smaller state, or more memory"
        )


def _text(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
