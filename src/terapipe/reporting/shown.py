"""One run to show: a Timeline, and what else is known of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terapipe.scheduling.timeline import Timeline

Steps = Sequence[tuple[float, float]]  # (second, bytes): so many from that second on


@dataclass(frozen=True)
class Shown:
    name: str  # "predicted", "measured", or an order's name
    timeline: Timeline
    idle: Sequence[Mapping[str, float]] = ()  # per rank: seconds by cause
    memory: Sequence[Steps] = ()  # per rank

    def __post_init__(self) -> None:
        ranks = self.timeline.plan.num_ranks
        if not self.timeline.computations:
            raise ValueError(f"a run to show needs at least one computation, {self.name!r} has none")
        for what, given in (("idle times", self.idle), ("memory curves", self.memory)):
            if len(given) not in (0, ranks):
                raise ValueError(f"{what} are given for every rank or for none, got {len(given)} for {ranks} ranks")

    def peak(self, rank: int) -> float:
        """The most bytes this rank held, 0 where that is not known."""
        return max((size for _, size in self.memory[rank]), default=0.0) if self.memory else 0.0

    @property
    def peaks(self) -> list[float]:
        return [self.peak(rank) for rank in range(len(self.memory))]
