"""Performs one rank's list of actions, with a method for each ``Op``. Whole backwards (B) and input halves (I) share
one; weight halves (W) that follow each other are done by one call.

The list is worked out before (``ActionLists``), so the loop (``Executor._perform_all``) decides nothing. Two slices on
the second of three stages, by an order that runs all forwards first::

    list      RECV_F 0  F 0  SEND_F 0  RECV_F 1  F 1  SEND_F 1  RECV_B 1  B 1  SEND_B 1  RECV_B 0  B 0  SEND_B 0
    waits               ^ for its input          ^                        ^ for its gradient       ^
    keeps     inputs, outputs and keys and values of slice 0 ------------------------------------> until B 0

A receive only posts a buffer, and F or B waits for it when it needs the numbers: by then they have usually arrived. A
send is not waited for either; its message stays alive until the other side must have it. So the devices compute while
messages travel. Backwards go from a sequence's last slice to its first, because keys and values of a slice get
gradients from all slices after it.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terapipe.modeling.key_values import GradientRoom
from terapipe.modeling.linear import changed_weight
from terapipe.modeling.offload import Copier, SavedTensors, stand_in_for_input, stand_in_for_output, storages_of
from terapipe.modeling.slice_cache import SliceCache
from terapipe.modeling.stage import Autocast, RandomState, SlicedStage, Stage
from terapipe.modeling.weight_grads import DeferredGrad, accumulate_deferred
from terapipe.planning.slices import Plan, Slice
from terapipe.runtime.action_lists import ActionLists, Run
from terapipe.runtime.auxiliary import AuxiliaryLosses, Sums
from terapipe.runtime.comm.channel import MessageFormat
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.loss_head import Batch, LossHead
from terapipe.runtime.offloaded import Kept, OffloadedCache
from terapipe.scheduling.actions import COMPUTE, COPIES, FORWARD, Action, Op, counterpart
from terapipe.scheduling.timeline import Event


class CachePool:
    """Caches of a rank's stages that no microbatch uses at the moment. They are not freed, because fresh memory is slow
    to touch the first time. A cache serves any cut of its sequences, so plans of one batch shape share them."""

    def __init__(self) -> None:
        self._gradients = GradientRoom()  # of all stages and microbatches
        self._spare: dict[tuple[int, int, int], list[SliceCache]] = {}  # by stage, sequences and tokens

    def take(self, k: int, stage: Stage, size: int, tokens: int) -> SliceCache:
        """A cache of the pool, or a new one.

        Args:
            k: the number of the stage.
            stage: makes a cache if the pool has none.
            size: sequences of the microbatch.
            tokens: of each.
        """
        spare = self._spare.get((k, size, tokens))
        if spare:
            return spare.pop()
        cache = stage.make_cache(size, tokens)
        cache.gradient_room = self._gradients
        return cache

    def give_back(self, k: int, size: int, cache: SliceCache) -> None:
        """Clears a cache and puts it into the pool.

        Args:
            k: the number of the stage.
            size: sequences of the microbatch.
            cache: what ``take`` returned.
        """
        cache.clear()
        self._spare.setdefault((k, size, cache.seq_len), []).append(cache)

    def keep_only(self, shapes: Collection[tuple[int, int]]) -> None:
        """Frees caches of other shapes.

        Args:
            shapes: sequences and tokens of those that stay.
        """
        self._spare = {key: caches for key, caches in self._spare.items() if key[1:] in shapes}
        self._gradients.keep_only(shapes)

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """Sequences and tokens of the caches that are kept."""
        return {(size, tokens) for (_, size, tokens), caches in self._spare.items() if caches}

    def __iter__(self) -> Iterator[SliceCache]:
        return (cache for caches in self._spare.values() for cache in caches)


Mark: TypeAlias = float | torch.cuda.Event  # a moment on a device


class Clock:
    """Tells when a device did what, by its own time if it is a GPU.

    Marks are cheap to take. They are read after the step.

    Args:
        device: the rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offset = min(_compare_clocks() for _ in range(8))[1]
        self._anchor: tuple[torch.cuda.Event, float] | None = None  # the same moment by the device and by the host

    def start(self) -> None:
        """Before the first step the host waits for the device once, to compare their times; later only when times are
        read, which waits anyway."""
        if self._device.type == "cuda" and self._anchor is None:
            self._compare()

    def _compare(self) -> None:
        event = self._event()
        event.synchronize()
        self._anchor = (event, time.perf_counter())

    def mark(self) -> Mark:
        """This moment on the device."""
        return self._event() if self._device.type == "cuda" else time.perf_counter()

    def read(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds since the epoch, so that ranks compare. The host waits for a GPU.

        Args:
            marks: what ``mark`` returned.
        """
        if self._device.type != "cuda":
            return [self._offset + mark for mark in marks if isinstance(mark, float)]
        assert self._anchor is not None
        event, host = self._anchor
        torch.cuda.synchronize(self._device)
        times = [self._offset + host + float(event.elapsed_time(m)) / 1e3 for m in marks if not isinstance(m, float)]
        self._compare()  # elapsed times are coarse after hours
        return times

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


PENDING = 8  # gradients sent and not yet known to have arrived; beyond that the oldest is waited for

Key = tuple[int, Slice]  # a slice on a stage


class Executor:
    """Runs batches of one plan on one rank. Shapes come from the plan, so no message announces another.

    Args:
        sliced: the stages of this rank, by number.
        plan: of the batches.
        pool: where caches come from.
        transport: to the other ranks.
        message_format: what messages look like.
        auxiliary: collects sums of layers, for losses of their own.
        copier: moves what slices keep to the host, and back.
        finished: is called as soon as a stage's gradients are complete, so that they can be summed over replicas while
            other stages are still at work.
    """

    def __init__(
        self,
        sliced: Mapping[int, SlicedStage],
        plan: Plan,
        pool: CachePool,
        transport: Transport,
        message_format: MessageFormat,
        auxiliary: AuxiliaryLosses,
        copier: Copier,
        finished: Callable[[int], None] = lambda stage: None,
    ) -> None:
        self._auxiliary, self._pool, self._copier = auxiliary, pool, copier
        self._sliced, self._plan, self._transport, self._format = sliced, plan, transport, message_format
        self._stages: dict[int, Stage] = {k: each.stage for k, each in sliced.items()}
        self._modes = {(k, s): mode for k in sliced for s, mode in zip(plan.slices, plan.recompute_of(k), strict=True)}
        self._lists = ActionLists.of(plan, transport.rank, early=transport.device.type == "cpu")
        self._last_stage = plan.num_stages - 1
        self._finished = finished
        actions = [run[0] for run in self._lists.training]
        self._offloaded = {(a.stage, a.slice) for a in actions if a.op is Op.OUT}
        self._offloaded_kv = {(a.stage, a.slice) for a in actions if a.op is Op.KV_OUT}
        ends = (a for a in actions if a.op not in COMPUTE and a.op not in COPIES)
        transfers = {(a.op, a.stage): counterpart(a).stage for a in ends}
        self._peers = {end: plan.rank_of(stage) for end, stage in transfers.items()}
        self._perform: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.SEND_F: self._send_output,
            Op.SEND_B: self._send_gradient,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.OUT: self._move_out,
            Op.BACK: self._bring_back,
            Op.KV_OUT: self._move_cache_out,
            Op.KV_BACK: self._bring_cache_back,
        }
        self._clock = Clock(transport.device)
        self._marks: list[tuple[Run, Mark, Mark]] = []
        self._reset()

    def _reset(self) -> None:
        self._caches: dict[tuple[int, int], SliceCache] = {}  # by stage and microbatch
        self._arriving: dict[Action, tuple[Tensor, dist.Work]] = {}
        self._inputs: dict[Key, Tensor] = {}
        self._outputs: dict[Key, Tensor] = {}  # for the next stage
        self._roots: dict[Key, Tensor] = {}  # of autograd's graph, where the backward starts
        self._kept: dict[Key, Kept] = {}  # of slices that are offloaded
        self._pairs: dict[Key, OffloadedCache] = {}  # keys and values of microbatches, by their last slices
        self._random: dict[Key, RandomState] = {}  # before the forward, for computing it again
        self._parameters: dict[int, list[tuple[str, Tensor]]] = {}  # of stages that compute something again ...
        self._versions: dict[Key, list[int]] = {}  # ... and their versions in the forward
        self._gradients: dict[Key, Tensor] = {}
        self._deferred: dict[Key, list[DeferredGrad]] = {}
        self._sums: dict[Key, Sums] = {}  # for auxiliary losses
        self._casts: dict[Tensor, Tensor] = {}  # weights as autocast wants them
        self._sent_outputs: dict[Key, tuple[Action, Tensor, dist.Work]] = {}
        self._sent_gradients: deque[tuple[Action, Tensor, dist.Work]] = deque()
        self.at: Action | None = None
        self.is_pending = False  # between forwards and backwards

    def run(self, batch: Batch, loss_head: LossHead, *, train: bool) -> Tensor:
        """Runs a whole batch.

        Args:
            batch: what to run.
            loss_head: what to make of the last stage's hidden states.
            train: whether backwards follow the forwards.

        Returns:
            The batch's loss where the last stage is; zero elsewhere.
        """
        self._begin(batch, loss_head, train=train)
        self._perform_all(self._lists.training if train else self._lists.forwards)
        self._end()
        return self._loss()

    def forwards(self, batch: Batch, loss_head: LossHead) -> None:
        """Runs the forwards of a step, all of which must come before its first backward; ``backwards`` does the rest.

        Args:
            batch: what to run.
            loss_head: collects values of the last stage.
        """
        self._begin(batch, loss_head, train=True)
        self._perform_all(self._forward_runs)
        self.at, self.is_pending = None, True

    def check_pending(self, batch: Batch) -> None:
        """Refuses the backward of a batch that is no longer in memory. Nothing has changed then.

        Args:
            batch: what ``forwards`` ran.
        """
        if not self.is_pending or self._batch is not batch:
            raise ValueError(
                "the pipeline computed another batch since the forward of this one, and let go of what its backward "
                "needs; call backward() before the next forward that needs gradients"
            )

    def backwards(self, batch: Batch) -> None:
        """Runs the rest of the step that ``forwards`` began. The loss head has its gradients now.

        Args:
            batch: what ``forwards`` ran.
        """
        self._format.begin(self._autocast)  # forwards of others may have come between
        self._perform_all(self._backward_runs)
        self._end()
        self.is_pending = False

    @cached_property
    def _forward_runs(self) -> list[Run]:
        return [run for run in self._lists.training if run[0].op in (*FORWARD, Op.OUT, Op.KV_OUT)]

    @cached_property
    def _backward_runs(self) -> list[Run]:
        return [run for run in self._lists.training if run[0].op not in (*FORWARD, Op.OUT, Op.KV_OUT)]

    def _begin(self, batch: Batch, loss_head: LossHead, *, train: bool) -> None:
        self._reset()
        self._batch, self._loss_head, self._train = batch, loss_head, train
        if self._auxiliary.size:
            self._auxiliary.begin(batch, train=train)
        self._longest = batch.longest
        self._marks.clear()
        self._clock.start()
        self._autocast = Autocast.current(self._transport.device)
        if self._last_stage in self._stages:
            loss_head.begin(self._stages[self._last_stage], batch, self._autocast, train=train)
        self._format.begin(self._autocast)
        self._autocast.forget_casts()

    def _end(self) -> None:
        self._autocast.forget_casts()
        self._casts.clear()
        while self._sent_outputs:
            self._wait_sent(self._sent_outputs.popitem()[1])
        while self._sent_gradients:
            self._wait_sent(self._sent_gradients.popleft())
        self.at = None

    def _loss(self) -> Tensor:
        loss = torch.zeros((), dtype=self._format.wide, device=self._transport.device)
        if self._last_stage in self._stages:
            for part in (self._loss_head.loss, self._auxiliary.loss):
                loss = loss if part is None else loss + part
        return loss

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Numbers beside the loss of the last run: the loss head's and auxiliary losses; empty where the last stage is
        not."""
        return {**self._loss_head.metrics, **self._auxiliary.metrics} if self._last_stage in self._stages else {}

    def _perform_all(self, runs: Sequence[Run]) -> None:
        """Performs one action after the other. ``at`` says where this rank stands, for messages about failures. When
        a stage's last backward is through, its gradients begin to be summed over replicas, while others compute."""
        # Caches made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.set_grad_enabled(self._train), self._autocast.off():
            for run in runs:
                self.at = run[0]
                if self.at.op is Op.W:
                    self._weights(run)
                else:
                    self._perform[self.at.op](self.at)
                if self._train and run[-1] in self._lists.completing:
                    self._finished(run[-1].stage)

    @property
    def plan(self) -> Plan:
        """That of the batches it runs."""
        return self._plan

    def events(self) -> list[Event]:
        """What this rank computed in the last run, and when."""
        rank, events = self._transport.rank, []
        times = iter(self._clock.read([mark for _, start, end in self._marks for mark in (start, end)]))
        for (run, _, _), start, end in zip(self._marks, times, times, strict=False):
            # Weight halves are done together, weight by weight: each gets its tokens' share of the time.
            tokens = list(accumulate((a.slice.size * a.slice.length for a in run), initial=0))
            unit = (end - start) / tokens[-1]
            for action, (before, after) in zip(run, pairwise(tokens), strict=True):
                events.append(Event(rank, action, start + before * unit, start + after * unit))
        return events

    # Computations

    def _forward(self, action: Action) -> None:
        _, k, s = action
        x = self._input(k, s)
        start = self._clock.mark()
        cache = self._cache(k, s)
        context = cache.begin(s.context, s.length, main_grads=True, forward_only=not self._train)
        mode = self._modes[k, s] if self._train else "none"
        leaf, kept = x, self._begin_kept(k, s)
        if kept is not None and k > 0:
            leaf, x = stand_in_for_input(x)
        if mode == "full":
            self._random[k, s] = RandomState.now(self._transport.device)
        with torch.set_grad_enabled(self._train and mode != "full"), self._autocast.on():
            out = self._sliced[k].forward(x, cache, recompute=mode, saved=None if kept is None else kept.saved)
        if mode != "none":
            self._note_versions(k, s)
        self._add_sums(k, s, context.pop_sums())
        if k == self._last_stage:
            with self._sliced[k].over(cache):
                self._loss_head.forward(s, out)
        if self._train:
            self._inputs[k, s] = leaf
            if mode != "full":
                self._roots[k, s] = out if kept is None else stand_in_for_output(out)
        if k < self._last_stage:
            self._outputs[k, s] = out
        # No other slice reads its keys and values, and its own backward computes them again.
        is_whole = s.length == self._plan.seq_len and mode == "full"
        if (not self._train and s.end == self._plan.seq_len) or is_whole:
            self._release(k, s)
        self._marks.append(((action,), start, self._clock.mark()))
        if kept is not None:
            self._start_out(k, s, kept, x, out)
        if self._train and (k, s) in self._offloaded_kv:
            self._pairs[k, s] = OffloadedCache(cache, self._make_saved())

    def _add_sums(self, k: int, s: Slice, sums: Sums) -> None:
        """Most models have no auxiliary losses, and layers that add no sums: nothing is called for them."""
        if sums:
            self._auxiliary.add(k, s, sums)
        if self._train and self._modes[k, s] != "full":
            self._sums[k, s] = sums
        if k == self._last_stage and self._extra_size(s):
            self._auxiliary.complete(k, s)

    def _extra_size(self, s: Slice) -> int:
        """How many numbers for auxiliary losses travel with a slice, in both directions: only with the last slice of a
        microbatch, whose sums are then complete."""
        return self._auxiliary.size if s.end == self._plan.seq_len else 0

    def _backward(self, action: Action) -> None:
        """The gradient of a slice goes through its stage::

        from the next stage, or the loss head           gradient of the output
        (recompute="full": the forward again)           output, keys and values
        from later slices, through the cache            gradients of this slice's keys and values
                                  |  autograd
        to .grad, or put off to W (op I)                gradients of weights
        to earlier slices, through the cache            gradients of their keys and values
        to the stage before                             gradient of the input, x.grad
        """
        _, k, s = action
        gradient = self._gradient(k, s) if k < self._last_stage else None
        start = self._clock.mark()
        cache = self._cache(k, s)
        context = cache.begin(s.context, s.length, defer=action.op is Op.I, main_grads=True)
        x, out = self._inputs.pop((k, s)), self._roots.pop((k, s), None)
        kept = self._kept.pop((k, s), None)
        if kept is not None:
            kept.saved.finish_back()
        if (k, s) in self._pairs:
            self._pairs.pop((k, s)).finish_back()
        if self._modes[k, s] != "none":
            self._check_versions(k, s)
        if self._modes[k, s] == "full":  # writes the same keys and values to the cache again
            x = x if kept is None else kept.input().requires_grad_(x.requires_grad)
            with self._random.pop((k, s)).restored(), self._autocast.on():
                out = self._sliced[k].forward(x, cache)
            self._sums[k, s] = context.pop_sums()
        assert out is not None
        if gradient is None:
            with self._sliced[k].over(cache):
                gradient = self._loss_gradient(s, out, kept)
        sums = self._sums.pop((k, s))
        others = self._auxiliary.roots(s, sums) if sums else []
        if out.requires_grad or others:  # a first stage may have nothing to train
            # Adds the gradients that later slices left for this slice's keys, values and states.
            self._sliced[k].backward(cache, out, gradient, others)
        elif k == 0 and s.end == self._plan.seq_len:
            self._refuse_untrained()
        if k > 0:
            if x.grad is None:
                raise ValueError(
                    f"the output of stage {k} must depend on its input by operations with gradients, or the layers "
                    "before it are not trained, got no gradient for the input; do not detach either in the stage, nor "
                    "compute it under torch.no_grad()"
                )
            self._gradients[k - 1, s] = x.grad
        self._deferred[k, s] = context.pop_deferred()
        if s.number == 0:
            self._release(k, s)
        self._marks.append(((action,), start, self._clock.mark()))

    def _loss_gradient(self, s: Slice, out: Tensor, kept: Kept | None) -> Tensor:
        """The gradient of the last stage's hidden states. Of an offloaded slice, gradient or hidden states came back
        from the host."""
        gradient = None if kept is None else kept.gradient()
        if gradient is not None:
            return gradient
        hidden = out if kept is None or self._modes[self._last_stage, s] == "full" else kept.output()
        return self._loss_head.gradient(s, hidden)

    def _note_versions(self, k: int, s: Slice) -> None:
        if k not in self._parameters:  # after a forward: FSDP has gathered them
            self._parameters[k] = list(self._stages[k].named_parameters())
        self._versions[k, s] = [p._version for _, p in self._parameters[k]]

    def _check_versions(self, k: int, s: Slice) -> None:
        """What is computed again must be computed with the same weights. Autograd sees the second time only."""
        for (name, p), version in zip(self._parameters[k], self._versions.pop((k, s)), strict=True):
            if p._version != version:
                raise changed_weight(name, p, version)

    def _refuse_untrained(self) -> None:
        """Where the output of the first stage has no gradient, nothing in it may be there to be trained; if it is the
        last stage too, nothing in its layers: its head is trained by the loss alone."""
        stage = self._stages[0]
        module = nn.ModuleList(stage.blocks) if self._last_stage == 0 else stage
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        if trained:
            raise ValueError(
                f"the output of stage 0 must depend on its parameters that are trained, {len(trained)} such as "
                f"{trained[0]}, got an output without a gradient; do not detach it in the stage, nor compute it under "
                "torch.no_grad(); switch adapters on that are trained; or freeze these parameters"
            )

    def _weights(self, run: Run) -> None:
        start = self._clock.mark()
        accumulate_deferred(grad for _, k, s in run for grad in self._deferred.pop((k, s)))
        self._marks.append((run, start, self._clock.mark()))

    def _input(self, k: int, s: Slice) -> Tensor:
        if k == 0:
            assert self._batch.input_ids is not None
            return self._batch.input_ids[s.row : s.row + s.size, s.context : s.end]
        receive = Action(Op.RECV_F, k, s)
        if receive in self._arriving:
            return self._take(receive).requires_grad_(self._train)
        if self._extra_size(s):
            self._auxiliary.receive(k, s, self._auxiliary.totals(k - 1, s))
        previous = self._outputs.pop((k - 1, s))
        return previous.detach().requires_grad_(self._train)  # the stage before is on this rank too

    def _gradient(self, k: int, s: Slice) -> Tensor:
        receive = Action(Op.RECV_B, k, s)
        if receive not in self._arriving:
            return self._gradients.pop((k, s))
        gradient = self._take(receive)
        # Its arrival shows that the output it answers has long been received: this wait ends at once.
        if (k, s) in self._sent_outputs:
            self._wait_sent(self._sent_outputs.pop((k, s)))
        return gradient

    # Transfers

    def _receive(self, action: Action) -> None:
        extra = self._extra_size(action.slice)
        shape, dtype = self._format.layout(self._shape(action), _boundary(action), extra)
        self._arriving[action] = self._transport.channel.receive(shape, dtype, self._peer(action), action)

    def _take(self, receive: Action) -> Tensor:
        message, work = self._arriving.pop(receive)
        self._transport.channel.wait(work, self._peer(receive), receive)
        size = self._extra_size(receive.slice)
        tensor, extra = self._format.unpack(message, self._shape(receive), _boundary(receive), size)
        if extra is not None and receive.op is Op.RECV_F:
            self._auxiliary.receive(receive.stage, receive.slice, extra)
        elif extra is not None:
            self._auxiliary.receive_gradient(receive.slice, extra)
        return tensor

    def _shape(self, transfer: Action) -> tuple[int, ...]:
        return self._stages[transfer.stage].hidden_shape(transfer.slice.size, transfer.slice.length)

    def _send_output(self, action: Action) -> None:
        key = action.stage, action.slice
        self._sent_outputs[key] = self._send(action, self._outputs.pop(key).detach())

    def _send_gradient(self, action: Action) -> None:
        gradient = self._gradients.pop((action.stage - 1, action.slice))
        self._sent_gradients.append(self._send(action, gradient))
        if len(self._sent_gradients) > PENDING:
            self._wait_sent(self._sent_gradients.popleft())

    def _send(self, action: Action, tensor: Tensor) -> tuple[Action, Tensor, dist.Work]:
        shape, boundary = self._shape(action), _boundary(action)
        if tensor.shape != shape or not self._format.fits(tensor.dtype, boundary):
            dtype = self._format.dtype(boundary) or "a floating dtype no wider than the parameters'"
            raise ValueError(
                f"{action} must send {tuple(shape)} of {dtype}, as the plan says, the stage made "
                f"{tuple(tensor.shape)} of {tensor.dtype}; hidden_shape() and the parameters must match its output"
            )
        message = self._format.pack(tensor, boundary, self._extra(action))
        return action, message, self._transport.channel.send(message, self._peer(action), action)

    def _extra(self, send: Action) -> Tensor | None:
        if not self._extra_size(send.slice):
            return None
        is_forward = send.op is Op.SEND_F
        return self._auxiliary.totals(send.stage, send.slice) if is_forward else self._auxiliary.gradient(send.slice)

    def _wait_sent(self, sent: tuple[Action, Tensor, dist.Work]) -> None:
        action, _, work = sent
        self._transport.channel.wait(work, self._peer(action), action)

    def _peer(self, transfer: Action) -> int:
        return self._peers[transfer.op, transfer.stage]

    # Copies to the host and back

    def _begin_kept(self, k: int, s: Slice) -> Kept | None:
        if not self._train or (k, s) not in self._offloaded:
            return None
        return Kept(self._make_saved())

    def _make_saved(self) -> SavedTensors:
        return SavedTensors(self._copier, self._transport.device, self._clock.mark)

    def _start_out(self, k: int, s: Slice, kept: Kept, x: Tensor, out: Tensor) -> None:
        """Says what of a slice must wait beside what autograd saves, and begins to copy all of it."""
        full = self._modes[k, s] == "full"
        if full:
            kept.keep_input(x)
        if k == self._last_stage:
            kept.keep_loss(self._loss_head.hand_over(s), None if full else out)
        kept.saved.start_out(storages_of([self._stages[k]], self._casts.values()))
        self._kept[k, s] = kept

    def _move_out(self, action: Action) -> None:
        """From here on the slice is in the memory of the host only. Its output was sent by now; if not, it stays until
        it is."""
        key = action.stage, action.slice
        if key in self._sent_outputs:
            self._wait_sent(self._sent_outputs.pop(key))
        saved = self._kept[key].saved
        saved.finish_out()
        self._marks.append(((action,), *saved.marks))

    def _bring_back(self, action: Action) -> None:
        saved = self._kept[action.stage, action.slice].saved
        saved.start_back()
        self._marks.append(((action,), *saved.marks))

    def _move_cache_out(self, action: Action) -> None:
        moved = self._pairs[action.stage, action.slice]
        moved.finish_out()
        self._marks.append(((action,), *moved.saved.marks))

    def _bring_cache_back(self, action: Action) -> None:
        saved = self._pairs[action.stage, action.slice].saved
        saved.start_back()
        self._marks.append(((action,), *saved.marks))

    # Caches

    def _cache(self, k: int, s: Slice) -> SliceCache:
        key = (k, s.microbatch)
        if key not in self._caches:
            cache = self._pool.take(k, self._stages[k], s.size, self._plan.seq_len)
            cache.set_documents(self._batch.documents[s.row : s.row + s.size], self._longest)
            cache.casts = self._casts
            self._caches[key] = cache
        return self._caches[key]

    def _release(self, k: int, s: Slice) -> None:
        """Gives a cache back to the pool. Where keys and values are offloaded it drops them first: a cache that waits
        for its next microbatch must not take the memory that offload saves."""
        if self._offloaded_kv:
            self._caches[k, s.microbatch].take_keys_and_values()
        self._pool.give_back(k, s.size, self._caches.pop((k, s.microbatch)))


def _boundary(transfer: Action) -> int:
    """Outputs cross the boundary after their stage, gradients the one before; receives those of their peers."""
    after = transfer.op in (Op.SEND_F, Op.RECV_B)
    return transfer.stage if after else transfer.stage - 1


def _compare_clocks() -> tuple[float, float]:
    """How long looking at both clocks took, and how far apart they are: the process may lose its core in between."""
    before, now, after = time.perf_counter(), time.time(), time.perf_counter()
    return after - before, now - (before + after) / 2
