"""Simulates what somebody else published: from a configuration in a data file to seconds, bytes or a bubble rate.

A row of a table says what was run: a model, a cluster, a layout, an order, slices, recomputation. `Setup` is that row,
`Simulation` what our planner and simulator make of it. There is one path for all tables, the one that ``terapipe
plan`` takes, so that a row tests the code which users get:

    [setup] of a TOML file ── Setup ── Simulation ──┬── cost and memory of the planner ── plan ── simulator ── a number
                                                    ├── ``times``: measured seconds instead of a cost model
                                                    └── ``sharding``: FSDP, which is no pipeline, by its estimate

Nothing here is fitted to a row. What a published program does otherwise than ours is an option of its setup, stated
from its documentation or code: how it keeps weights and gradients (``state_bytes``), what it copies
(``prefix_copies``), whether its transfers wait (``overlapped``), what its layers keep (``saved``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from terapipe.planning.analytic import AnalyticCost
from terapipe.planning.cost import Cost, StageSpec, by_side, stage_specs, with_recompute
from terapipe.planning.device import COLLECTIVES, CONTEXT, GB, GIB, MIB, usable_memory
from terapipe.planning.hardware import Cluster, with_attention
from terapipe.planning.layout import Layout
from terapipe.planning.memory import MOST_BYTES, ShapeMemory
from terapipe.planning.presets import GPTConfig, gpt_config
from terapipe.planning.recompute import Recompute
from terapipe.planning.slices import Plan, even_lengths, microbatch_sizes
from terapipe.published.programs import (
    AttentionAgain,
    OtherProgram,
    OtherSource,
    PrefixCopies,
    ShardedMemory,
    StageTimes,
)
from terapipe.scheduling.footprint import peaks
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.simulator import makespan, program, simulate
from terapipe.scheduling.timeline import Timeline
from terapipe.search.choose import choose
from terapipe.search.evaluator import PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.rivals import Rival, Way, estimate
from terapipe.search.throughput import step_flops
from terapipe.search.traffic import ring

# Seconds of one step of a ring, which has as many as devices but one: to a device of the same host, and to the next
# host. NCCL's own model (src/graph/tuning.cc), by which it chooses among algorithms.
RING_STEP, RING_STEP_BETWEEN = 3.4e-6, 9.6e-6


@dataclass(frozen=True)
class Setup:
    """The configuration behind one published number. The keys of ``setup`` in a data file are its fields.

    Attributes:
        model: A preset's name, or the fields of a `GPTConfig`.
        cluster: ``HOST:COUNT``, as on the command line.
        times: Instead of the planner's cost model: milliseconds of a stage's forward, of the input and of the weight
            half of its backward, and of a transfer. They hold for one microbatch; a slice takes its share.
        layout: Replicas, pipeline ranks, tensor parallel ranks.
        batch_size: Sequences in a step, over all replicas.
        microbatch: Sequences of a microbatch.
        seq_len: Tokens of a sequence.
        order: Of our orders, the one that equals the published schedule.
        chunks: Stages of a rank.
        bare_ends: Whether the first stage may be the embedding alone, and the last the head alone.
        slices: A number of slices, their lengths, or ``"planned"``: those that the planner chooses.
        slice_length: Instead of ``slices``: all slices have so many tokens, and the last the rest.
        cut: Where a number of slices is cut: into ``"even"`` lengths, or into equal ``"flops"``.
        recompute: As in a plan.
        ends: Whether embedding, head and loss were part of what was timed.
        sharding: ``"ring"``: no pipeline, but FSDP; if there are more devices than sequences, each sequence is over
            several.
        devices: With ``sharding``, how many devices of the cluster were used; all if left out.
        offload: With ``sharding``, whether what layers keep for their backward is on the host.
        early_stop: Whether full recomputation is by layers and leaves out the last product of each, as torch's
            checkpoints that are not reentrant do.
        products_again: Share of a layer's products that the backward of a program computes again, which keeps the rest
            (recompute light).
        prefetch: With ``sharding``, whether the weights of a layer are gathered while the backward of another one runs,
            and gradients are summed likewise. FSDP's ``BACKWARD_POST`` gathers weights after the backward before,
            behind the sum of its gradients, and then a layer waits for both.
        host_optimizer: With ``sharding``, where the optimizer is on the host: bytes of each parameter that a step reads
            or writes in the host's memory, and bytes that are copied between it and a device.
        host_bandwidth: With ``host_optimizer``, bytes per second of a host's memory.
        attention_kernel: The kernel of attention that the program used; that of the device if left out.
        masked: Whether the program passes a mask of its own to attention, which then computes whole rectangles.
        card: Bytes per second of a host's network card, where it is not the cluster's.
        rings: Share of that bandwidth which sums over replicas reach, where it is not the cluster's.
        bandwidth: Bytes per second of a device's memory, where it is not the cluster's.
        overlapped: Whether ranks compute while they send, where it is not as in the cluster.
        summed: Bytes of a gradient in the sum over replicas, where they are not in float32.
        overlapped_sums: Whether gradients are summed over replicas while the last microbatch's backward runs, as
            torch's DistributedDataParallel does.
        fuses: Whether products add gradients of weights to their sums themselves, where it is not as on the device.
            Megatron-LM does since 2022; before, a gradient was written, read and added.
        sequence_parallel: Whether tensor parallel ranks divide norms and residuals among them.
        scatter: Whether each of them sends its part of a message, or each all of it.
        batched: Whether what a rank sends and what it receives pass one after the other, in one kernel.
        staggered: Whether each rank goes on to the next step when it is done, so that a step takes as long as the
            longest span of a rank. Otherwise all ranks wait for each other.
        prefix_copies: Whether a slice's attention copies all earlier keys and values: see `PrefixCopies`.
        attention_again: Whether backwards compute attention between queries, keys and values once more: see
            `AttentionAgain`.
        state_bytes: Bytes of weight, gradient and optimizer of each parameter on a device, where the program does not
            keep them as ours does.
        layer_checkpoints: Whether full recomputation is by layers, as elsewhere, not by stages: see `OtherProgram`.
        saved: Bytes that a layer keeps of a token for each feature of hidden states, of queries, of keys and values, of
            the MLP, counted from the program's code. This and what follows is explained in `OtherProgram`.
        score_bytes: Bytes that a layer keeps of two tokens for each head, without FlashAttention.
        mask_bytes: Bytes of two tokens in a mask that is there for the whole step.
        layer_masks: Bytes of two tokens in a layer's own mask: those that it keeps, and those while it is computed.
        logit_bytes: Bytes of a logit, over all copies that head and loss have at a time.
        logits_chunk: Tokens whose logits are there at a time.
        head: ``"spread"`` over all pipeline ranks, or ``"apart"`` if it is not counted.
        kv_gradient_bytes: Bytes of the gradients of keys and values of a token, for each feature of queries.
        temporaries: Whether what a backward needs while it runs is counted.
        whole_layer: Bytes of all tokens, for each feature of hidden states and of queries, in a layer's backward.
        mlp_turn: With ``sharding`` and ``saved``, bytes in the backward of an MLP: see `ShardedMemory`.
        attention_turn: The same in the backward of attention.
        whole_device: Whether memory was read from the driver, and so includes context and NCCL.
        memory: ``"unlimited"`` if the planner may choose slices without regard to memory.
    """

    model: GPTConfig | None = None
    cluster: str = ""
    times: tuple[float, float, float, float] | None = None
    layout: Layout = field(default_factory=Layout)
    batch_size: int = 1
    microbatch: int = 1
    seq_len: int = 1
    order: str = "gpipe"
    chunks: int = 1
    bare_ends: bool = False
    slices: int | tuple[int, ...] | str = 1
    slice_length: int | None = None
    cut: str = "even"
    recompute: Recompute = "none"
    ends: bool = True
    sharding: str = ""
    devices: int | None = None
    offload: bool = False
    early_stop: bool = False
    products_again: float = 0.0
    prefetch: bool = True
    host_optimizer: tuple[float, float] = (0.0, 0.0)
    host_bandwidth: float = 1.0
    attention_kernel: str = ""
    masked: bool = False
    card: float | None = None
    rings: float | None = None
    bandwidth: float | None = None
    overlapped: bool | None = None
    summed: int | None = None
    overlapped_sums: bool = False
    fuses: bool | None = None
    sequence_parallel: bool = True
    scatter: bool = True
    batched: bool = False
    staggered: bool = False
    prefix_copies: bool = False
    attention_again: bool = False
    state_bytes: float | None = None
    layer_checkpoints: bool = False
    saved: tuple[float, ...] = ()
    score_bytes: float = 0.0
    mask_bytes: float = 0.0
    layer_masks: tuple[float, ...] = (0.0, 0.0)
    logit_bytes: float | None = None
    logits_chunk: int | None = None
    head: str = ""
    kv_gradient_bytes: float | None = None
    temporaries: bool = True
    whole_layer: tuple[float, ...] = (0.0, 0.0)
    mlp_turn: tuple[float, ...] = (0.0, 0.0)
    attention_turn: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    whole_device: bool = False
    memory: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Reads the ``setup`` of a data file.

        Args:
            data: Field names and values as TOML has them: lists instead of tuples, a model by name or by its fields.
        """
        unknown = set(data) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"a setup has the keys {[f.name for f in fields(cls)]}, got {sorted(unknown)}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        try:
            if "model" in values:
                model = values["model"]
                values["model"] = gpt_config(model) if isinstance(model, str) else GPTConfig(**model)
            if "layout" in values:
                values["layout"] = Layout(*values["layout"])
        except TypeError as error:  # keys that a GPTConfig does not have, or more than three numbers
            raise ValueError(f"a setup's model or layout cannot be read: {error}") from None
        return cls(**values)

    @property
    def described(self) -> bool:
        """Whether it says enough to simulate anything."""
        return self.times is not None or (self.model is not None and bool(self.cluster))


class Simulation:
    """What our simulator says about a setup. Everything is computed when it is asked for.

    Args:
        setup: What was run.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    # The parts, as the planner makes them

    @cached_property
    def cluster(self) -> Cluster:
        """The named cluster, with what the setup says about its card, its kernel and its transfers."""
        setup, cluster = self.setup, Cluster(self.setup.cluster)
        host = cluster.host
        if setup.card is not None:
            host = replace(host, inter_node=replace(host.inter_node, bandwidth=setup.card))
        if setup.rings is not None:
            host = replace(host, rings=setup.rings)
        if setup.bandwidth is not None:
            host = replace(host, device=replace(host.device, bandwidth=setup.bandwidth))
        if setup.overlapped is not None:
            host = replace(host, overlapped=setup.overlapped)
        if setup.summed is not None:
            host = replace(host, device=replace(host.device, summed=setup.summed))
        if setup.fuses is not None:
            host = replace(host, device=replace(host.device, fuses=setup.fuses))
        if setup.attention_kernel:
            host = replace(host, device=with_attention(host.device, setup.attention_kernel))
        if setup.masked:
            speed = host.device.attention_speed._replace(causal=False)
            host = replace(host, device=replace(host.device, attention_speed=speed))
        return Cluster(cluster.name, host, cluster.hosts)

    @cached_property
    def source(self) -> OtherSource:
        """Model and cluster, as the planner takes them."""
        if self.setup.model is None:
            raise ValueError("a setup without a model has no cluster source; give model and cluster")
        names = ("ends", "sequence_parallel", "scatter", "batched", "early_stop", "products_again")
        return OtherSource(self.setup.model, self.cluster, **{name: getattr(self.setup, name) for name in names})

    @cached_property
    def evaluator(self) -> PlanEvaluator:
        """The planner's own evaluator of plans in this layout: its costs, its memory, its cuts."""
        return PlanEvaluator(self.source, self._request, self.setup.layout, self.setup.recompute)

    @property
    def _request(self) -> Request:
        s, layout = self.setup, self.setup.layout
        memory = MOST_BYTES if s.memory == "unlimited" else None
        request = Request(s.batch_size, s.seq_len, recompute=s.recompute, memory=memory, bare_ends=s.bare_ends)
        return request.fixed(dp=layout.dp, pp=layout.pp, tp=layout.tp)

    @cached_property
    def cost(self) -> Cost:
        """Seconds: measured ones if the setup has them, else those of the planner's cost model."""
        s = self.setup
        if s.times is not None:
            per_step = self.evaluator.cost.per_step([self.evaluator.slowest_stage]) if s.model else 0.0
            whole = self.setup.chunks * s.microbatch * s.seq_len
            forward, inputs, weights, transfer = (ms * 1e-3 for ms in s.times)
            return StageTimes(forward, inputs, weights, transfer, whole, per_step)
        if s.prefix_copies:
            return with_recompute(PrefixCopies.of(self.evaluator.cost, self.source, s.layout), s.recompute)
        if s.attention_again and isinstance(self.evaluator.cost, AnalyticCost):
            return AttentionAgain(self.evaluator.cost, self.evaluator.cost.attention)
        return self.evaluator.cost

    @cached_property
    def memory(self) -> ShapeMemory:
        """Bytes, by the planner's memory model, with what the published program keeps otherwise."""
        memory = with_recompute(self.source.memory(self.setup.layout), self.setup.recompute)
        if not isinstance(memory, ShapeMemory):
            raise TypeError(f"a cluster's memory model counts shapes, got {type(memory).__name__}")
        values = {f.name: getattr(memory, f.name) for f in fields(memory)}
        setup = self.setup
        values |= {"divided": setup.sequence_parallel, "ranks": setup.layout.pp}
        others = {f.name: getattr(setup, f.name) for f in fields(OtherProgram) if f.name not in values}
        return OtherProgram(**values, **others)

    @cached_property
    def plan(self) -> Plan:
        """The published cut of batch, tokens and layers, in our words."""
        s = self.setup
        if s.slices == "planned":
            return choose(self.source, self._request.fixed(order=s.order, chunks=self.setup.chunks)).estimate.plan
        sizes = microbatch_sizes(s.batch_size // s.layout.dp, s.microbatch)
        lengths = (self._lengths(s.seq_len),) * len(sizes)
        return Plan(sizes, lengths, self._boundaries(), s.order, self.setup.chunks, s.recompute)

    def _lengths(self, seq_len: int) -> tuple[int, ...]:
        """The slices of a sequence of so many tokens."""
        s = self.setup
        if isinstance(s.slices, tuple):
            return s.slices
        count = -(-seq_len // s.slice_length) if s.slice_length else int(s.slices)
        return self._equal_flops(count) if s.cut == "flops" else even_lengths(seq_len, count)

    def _equal_flops(self, count: int) -> tuple[int, ...]:
        """Cuts a sequence where equal shares of a layer's FLOPs end: late tokens attend to more, so late slices are
        shorter. Up to token n a layer does a n + b n^2 of them, which has its share where

            n = (-a + sqrt(a^2 + 4 b share)) / 2 b
        """
        model, tokens = self.source.config, self.setup.seq_len
        a, b = 2.0 * model.layer_parameters, 2.0 * model.attention_width
        shares = np.arange(1, count) / count * (a * tokens + b * tokens**2)
        ends = np.round((np.sqrt(a * a + 4 * b * shares) - a) / (2 * b)).astype(int).tolist()
        return tuple(np.diff([0, *ends, tokens]).tolist())

    def _boundaries(self) -> tuple[int, ...]:
        """As many layers on each stage, which is what published runs do; where that is not possible, as the planner
        balances them. Measured times are those of a stage, so one layer stands for each."""
        s = self.setup
        stages = s.layout.pp * self.setup.chunks
        layers = stages if s.times is not None else self.source.layers
        if layers % stages == 0:
            return tuple(range(0, layers + 1, layers // stages))
        return self.evaluator.rank_boundaries(s.order, self.setup.chunks)

    # What a table may ask for

    @cached_property
    def estimate(self) -> Rival:
        """Time and memory of FSDP with each sequence over a ring of devices, which is no pipeline."""
        s = self.setup
        devices = s.devices or self.source.devices
        cp = max(1, devices // s.batch_size)
        way = Way(dp=devices // cp, cp=cp, shards=devices, size=s.microbatch, recompute=s.recompute)
        return estimate(self.source, Request(s.batch_size, s.seq_len), way, offload=s.offload)

    @cached_property
    def timeline(self) -> Timeline:
        """Every computation of the step."""
        return simulate(schedule(self.plan), self.cost)

    @cached_property
    def compute_time(self) -> float:
        """Seconds of all forwards and backwards, without optimizer and sums over replicas."""
        return makespan(self.plan, self.cost)[0]

    @cached_property
    def step_time(self) -> float:
        """Seconds of a step."""
        if self.setup.sharding:
            return self.estimate.step_time + self._waits + self._host_optimizer
        specs = stage_specs(self.plan.boundaries)
        ranks = {tuple(specs[k] for k in self.plan.stages_of(rank)) for rank in range(self.plan.num_ranks)}
        seconds = self.longest_span if self.setup.staggered else self.compute_time
        return seconds + max(self.cost.per_step(rank) - self._hidden_sums(rank) for rank in ranks)

    @property
    def _waits(self) -> float:
        """Seconds of gathers and sums over shards in backwards that the estimate hides, where the program does not."""
        s, way, config = self.setup, self.estimate.way, self.source.config
        if s.prefetch:
            return 0.0
        device, length = self.cluster.host.device, s.seq_len / way.cp
        weights = config.layer_parameters * (way.shards - 1) / way.shards
        hosts = -(-way.shards // self.cluster.host.devices)
        steps = (way.shards - hosts) * RING_STEP + (hosts - 1) * RING_STEP_BETWEEN
        moved = sum(
            steps + ring(self.cluster, weights * each, way.shards).seconds for each in (device.element, device.summed)
        )
        cost = by_side(with_recompute(self.source.cost(Layout()), s.recompute))[0]
        backward = float(cost.backward(StageSpec(1), way.size, length, (s.seq_len - length) / 2))
        return config.layers * s.batch_size / (way.dp * way.size) * min(backward, moved)

    @property
    def _host_optimizer(self) -> float:
        """Seconds of an optimizer on the hosts, and of what is copied for it, after the backward."""
        (moved, copied), host, devices = self.setup.host_optimizer, self.cluster.host, self.estimate.way.devices
        hosts = -(-devices // host.devices)
        seconds = moved / hosts / self.setup.host_bandwidth + copied / devices / host.copies.bandwidth
        return self.source.config.parameters * seconds

    def _hidden_sums(self, stages: tuple[StageSpec, ...]) -> float:
        """Seconds of a rank's sum over replicas that pass while its last microbatch's backward runs."""
        cost = self.cost
        if not (self.setup.overlapped_sums and isinstance(cost, AnalyticCost)):
            return 0.0
        backward = sum(float(cost.backward(stage, self.setup.microbatch, self.setup.seq_len, 0)) for stage in stages)
        return min(cost.sums_over_replicas(stages), backward)

    @cached_property
    def longest_span(self) -> float:
        """Seconds from a rank's first computation to its last, on the rank where that is longest. It is less than the
        whole step where ranks begin and end one after the other, and need not wait for each other in between."""
        return max(max(e.end for e in rank) - min(e.start for e in rank) for rank in self.timeline.by_rank)

    @cached_property
    def bubble_rate(self) -> float:
        """The share of a rank's longest span in which it does not compute."""
        busy = max(sum(e.end - e.start for e in rank) for rank in self.timeline.by_rank)
        return 1.0 - busy / self.longest_span

    @cached_property
    def peak_bytes(self) -> float:
        """Bytes on the device that needs most."""
        if self.setup.sharding:
            return self._sharded_peak
        others = CONTEXT + COLLECTIVES * (self.setup.layout.devices > 1) if self.setup.whole_device else 0
        return self._peak(self.plan) + others

    @property
    def _sharded_peak(self) -> float:
        """Counted from the program's code if the setup says so, else the estimate of FSDP."""
        s, way = self.setup, self.estimate.way
        if not s.saved or s.state_bytes is None:
            return self.estimate.peak_bytes
        names = ("state_bytes", "offload", "saved", "mlp_turn", "attention_turn")
        element = self.cluster.host.device.element
        memory = ShardedMemory(self.source.config, element, **{name: getattr(s, name) for name in names})
        return memory.peak(way.size * s.seq_len / way.cp, way.size * s.seq_len, way.shards)

    def _peak(self, plan: Plan) -> float:
        return float(max(peaks(program(plan), plan, self.memory)))

    @cached_property
    def longest(self) -> float:
        """The longest sequence in tokens, to 100, whose step fits into a device. More tokens need more memory, so it
        is found by bisection."""
        budget, low, high = self._budget, 0, 1
        while self._fits(100 * high, budget):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(100 * middle, budget) else (low, middle)
        return 100.0 * low

    def _fits(self, tokens: int, budget: int) -> bool:
        s, lengths = self.setup, (self._lengths(tokens),)
        return self._peak(Plan((1,), lengths, self._boundaries(), s.order, self.setup.chunks, s.recompute)) <= budget

    @cached_property
    def fits(self) -> bool | None:
        """Whether the step fits into a device by our count; None where memory is not counted."""
        if self.setup.times is not None or self.setup.sharding or self.setup.memory == "unlimited":
            return None
        return self.peak_bytes <= self._budget

    @property
    def _budget(self) -> int:
        """Bytes that a step may have of a device. One device alone has no NCCL."""
        return usable_memory(self.cluster.host.device) + COLLECTIVES * (self.setup.layout.devices == 1)

    @property
    def devices(self) -> int:
        """How many devices have work."""
        return self.estimate.way.devices if self.setup.sharding else self.setup.layout.devices

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices together."""
        return self.setup.batch_size * self.setup.seq_len / self.step_time

    @property
    def flops_per_device(self) -> float:
        """FLOPs of the model per second and device, those of recomputation not counted."""
        flops = step_flops(self.source, self.setup.batch_size, self.setup.seq_len) or 0.0
        return flops / self.step_time / self.devices

    @property
    def samples_per_device(self) -> float:
        """Sequences per second and device."""
        return self.setup.batch_size / self.step_time / self.devices

    @property
    def layer_time(self) -> float:
        """Seconds of the forward of one layer over a whole sequence."""
        return float(self.evaluator.cost.forward(StageSpec(1), self.setup.microbatch, self.setup.seq_len, 0))


@dataclass(frozen=True)
class Measure:
    """A unit of a table, and how a simulation answers in it.

    Attributes:
        of: From a simulation to the number.
        points: Whether errors are differences (of rates), not relative.
        timed: Whether it is a time, so that the step must fit into memory, too.
    """

    of: Callable[[Simulation], float]
    points: bool = False
    timed: bool = False


MEASURES: dict[str, Measure] = {
    "s": Measure(lambda s: s.step_time, timed=True),
    "ms": Measure(lambda s: s.step_time * 1e3, timed=True),
    "tokens/s": Measure(lambda s: s.tokens_per_second, timed=True),
    "tokens/s per GPU": Measure(lambda s: s.tokens_per_second / s.devices, timed=True),
    "TFLOP/s per GPU": Measure(lambda s: s.flops_per_device / 1e12, timed=True),
    "samples/s per GPU": Measure(lambda s: s.samples_per_device, timed=True),
    "s of forward and backward": Measure(lambda s: s.compute_time, timed=True),
    "ms of a layer": Measure(lambda s: s.layer_time * 1e3),
    "bubble rate": Measure(lambda s: s.bubble_rate, points=True),
    "idle share": Measure(lambda s: makespan(s.plan, s.cost)[1], points=True),
    "GB": Measure(lambda s: s.peak_bytes / GB),
    "GiB": Measure(lambda s: s.peak_bytes / GIB),
    "MiB": Measure(lambda s: s.peak_bytes / MIB),
    "thousand tokens": Measure(lambda s: s.longest / 1e3),
}
"""What a table's numbers may be, by the text of its ``unit``."""
