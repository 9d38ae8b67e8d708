"""Costs from a Profile: what was measured, interpolated; and a term for the context that is zero without one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np

from terapipe.planning.cost import Array, LinkBehavior, Numbers, StageSpec
from terapipe.planning.layout import Layout
from terapipe.planning.memory import parameters
from terapipe.planning.profile import Profile, Sample, Transfer, typical


@dataclass(frozen=True)
class Fit:
    """Seconds of the measured stage, for one kind of work.

    ``tables`` holds, for each measured microbatch size, lengths and seconds without context. ``context`` are the
    coefficients of what a context adds: a second block of attention at all, its keys and values, and its scores.
    """

    tables: dict[int, tuple[Array, Array]]
    context: Array

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Fit":
        tables = {}
        for n in sorted({s.size for s in samples}):
            rows = sorted((s.length, typical(s.seconds)) for s in samples if s.size == n and not s.context)
            tables[n] = (np.array([r[0] for r in rows], float), np.array([r[1] for r in rows], float))
        bare = cls(tables, np.zeros(3))
        behind = [s for s in samples if s.context]
        if not behind:
            return bare
        size, length, context = np.array([(s.size, s.length, s.context) for s in behind], float).T
        seconds = np.array([typical(s.seconds) for s in behind])
        added = seconds - bare(size, length, context)
        return cls(tables, _not_negative(_features(size, length, context), added, seconds))

    def __call__(self, size: Numbers, length: Numbers, context: Numbers) -> Array:
        sizes, lengths, contexts = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (size, length, context)))
        added: Array = np.asarray(_features(sizes, lengths, contexts) @ self.context, dtype=np.float64)
        return np.maximum(self._without_context(sizes, lengths), 0.0) + added

    def _without_context(self, size: Array, length: Array) -> Array:
        known = list(self.tables)
        rows = np.stack([_line(length, *self.tables[n]) for n in known])
        if len(known) == 1:
            return np.asarray(rows[0] * size / known[0], dtype=np.float64)
        at = np.clip(np.searchsorted(known, size, side="right") - 1, 0, len(known) - 2)
        low, high = np.take(known, at), np.take(known, at + 1)
        below, above = (np.take_along_axis(rows, (at + i)[None], 0)[0] for i in (0, 1))
        return np.asarray(below + (above - below) * (size - low) / (high - low), dtype=np.float64)


def _features(size: Array, length: Array, context: Array) -> Array:
    return np.stack([1.0 * (context > 0), size * context, size * length * context], axis=-1)


def _not_negative(features: Array, wanted: Array, scale: Array) -> Array:
    """Least squares of relative errors, no coefficient below zero: the best of all subsets that give none."""
    best, least = np.zeros(features.shape[1]), float(np.sum((wanted / scale) ** 2))
    rows = features / scale[:, None]
    for count in range(1, features.shape[1] + 1):
        for subset in map(list, combinations(range(features.shape[1]), count)):
            found = np.linalg.lstsq(rows[:, subset], wanted / scale, rcond=None)[0]
            error = float(np.sum((rows[:, subset] @ found - wanted / scale) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(features.shape[1]), error
                best[subset] = found
    return best


def _line(x: Array, xs: Array, ys: Array) -> Array:
    """Straight between the points, and beyond them as between the last two."""
    if len(xs) == 1:
        return np.asarray(ys[0] * x / xs[0], dtype=np.float64)
    at = np.clip(np.searchsorted(xs, x) - 1, 0, len(xs) - 2)
    slope = (ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at])
    return np.asarray(ys[at] + slope * (x - xs[at]), dtype=np.float64)


@dataclass(frozen=True)
class MeasuredLink:
    """Messages between two ranks: their bytes, rising, and seconds."""

    nbytes: Array
    seconds: Array
    between_hosts: bool

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> "MeasuredLink":
        rows = sorted((t.nbytes, typical(t.seconds)) for t in transfers)
        nbytes, seconds = (np.array(column, float) for column in zip(*rows, strict=True))
        return cls(nbytes, seconds, any(t.between_hosts for t in transfers))

    @cached_property
    def latency(self) -> float:
        """What a message of no bytes would take."""
        return float(np.clip(_line(np.zeros(()), self.nbytes, self.seconds), 0.0, self.seconds.min()))

    def __call__(self, nbytes: Numbers) -> Array:
        return np.maximum(_line(np.asarray(nbytes, np.float64), self.nbytes, self.seconds), self.latency)


NO_LINK = MeasuredLink(np.ones(1), np.zeros(1), False)  # nothing was measured: transfers are free


@dataclass(frozen=True)
class FittedCost:
    """Ranks, numbered tensor innermost, then pipe, then data, fill hosts in order, each with as many as measured."""

    profile: Profile
    recompute: bool = False
    layout: Layout = field(default_factory=Layout)

    def __post_init__(self) -> None:
        for kind in ("forward", "backward"):
            if not any(s.kind == kind and not s.context and not s.held_out for s in self.profile.samples):
                raise ValueError(
                    f"the profile has no {kind} without context to start from; run `terapipe profile` again"
                )

    @cached_property
    def _fits(self) -> dict[str, Fit]:
        used = [s for s in self.profile.samples if not s.held_out]
        kinds = {s.kind for s in used}
        return {kind: Fit.of([s for s in used if s.kind == kind]) for kind in kinds}

    def _of(self, kind: str, size: Numbers, length: Numbers, context: Numbers = 0.0) -> Array:
        fit = self._fits.get(kind)
        return fit(size, length, context) if fit else np.zeros(np.broadcast(size, length, context).shape)

    def forward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        seconds = self._of("forward", size, length, context) * (stage.layers / self.profile.layers)
        if stage.first:
            seconds = seconds + self._of("embedding", size, length)
        return seconds + self._of("head", size, length) if stage.last else seconds

    def backward(self, stage: StageSpec, size: Numbers, length: Numbers, context: Numbers) -> Array:
        seconds = self._of("backward", size, length, context) * (stage.layers / self.profile.layers)
        if self.recompute:
            seconds = seconds + self._of("forward", size, length, context) * (stage.layers / self.profile.layers)
        return seconds + self._of("embedding_backward", size, length) if stage.first else seconds

    def weights(self, stage: StageSpec, size: Numbers, length: Numbers) -> Array:
        return self._of("weights", size, length) * (stage.layers / self.profile.layers)

    def transfer(self, source: int, target: int, size: Numbers, length: Numbers) -> Array:
        nbytes = np.multiply(size, length) * float(self.profile.config.hidden * self.profile.element)
        return self._link(source * self.layout.tp, target * self.layout.tp)(nbytes)

    def link_behavior(self, source: int, target: int) -> LinkBehavior:
        """A rank on a CPU sends by a thread that shares its cores with the one that computes, and inside a host copying
        is all there is to it; a message to another host mostly waits for the wire."""
        link = self._link(source * self.layout.tp, target * self.layout.tp)
        return LinkBehavior(link.between_hosts or self.profile.machine.get("device") != "cpu", link.latency)

    def per_step(self, held: Sequence[StageSpec]) -> float:
        """The optimizer, gradients summed over replicas, a tied weight's exchanged between first and last rank."""
        config, count = self.profile.config, parameters(self.profile.config, held)
        seconds = count * typical(self.profile.optimizer) + self._reduction(count)
        if config.tied and any(stage.first for stage in held) != any(stage.last for stage in held):
            ends = self._link(0, (self.layout.pp - 1) * self.layout.tp)
            seconds += float(ends(float(self.profile.element) * config.vocab * config.hidden))
        return seconds

    # Links

    @cached_property
    def _links(self) -> tuple[MeasuredLink, MeasuredLink]:
        """Inside a host and between hosts; where only one kind was measured, it stands for both."""
        transfers = self.profile.transfers
        if not transfers:
            return NO_LINK, NO_LINK
        inside, between = ([t for t in transfers if t.between_hosts == apart] for apart in (False, True))
        return MeasuredLink.of(inside or between), MeasuredLink.of(between or inside)

    def _link(self, a: int, b: int) -> MeasuredLink:
        per_host = self.profile.ranks_per_host
        return self._links[a // per_host != b // per_host]

    def _reduction(self, count: int) -> float:
        """All replicas sum their gradients, in their own dtype, round a ring; what leaves a host shares one link."""
        dp, replica = self.layout.dp, self.layout.pp * self.layout.tp
        if dp == 1:
            return 0.0
        sent = 2 * (dp - 1) / dp * self.profile.element * count
        per_host = self.profile.ranks_per_host
        if self.layout.devices <= per_host:
            return float(self._link(0, 0)(sent))
        return float(self._link(0, per_host)(sent * min(replica, per_host)))

    def errors(self) -> list[float]:
        """Relative errors on the samples that were held out of the fit."""
        return [
            float(self._of(s.kind, s.size, s.length, s.context)) / typical(s.seconds) - 1
            for s in self.profile.samples
            if s.held_out
        ]
