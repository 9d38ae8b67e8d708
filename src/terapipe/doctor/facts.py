"""Facts about ranks, hosts and links, as plain data. No torch here: the doctor must run where torch does not load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Facts:
    """What one rank knows of itself and its host. A new field needs a default: hosts may have different releases."""

    rank: int
    host: str
    addresses: tuple[str, ...]  # that the host's own name resolves to
    local_ranks: int
    versions: Mapping[str, str]
    needs: Mapping[str, str]  # version specifiers by the same names, for example "<3,>=2.9"
    gloo: bool
    nccl: bool
    gpus: int
    kernels: tuple[str, ...]  # dtypes whose fast attention kernel passed its self-test, with its name
    fallbacks: tuple[str, ...]  # why the other dtypes use plain attention
    cores: tuple[int, ...]  # CPU affinity of this rank
    all_cores: int
    threads: int
    load: float  # 1-minute load average
    memory: int  # free bytes
    shared_memory: int | None
    files: int | None  # limit on open files, None if there is none


@dataclass(frozen=True)
class Link:
    """The connection between rank 0 and another rank, as measured."""

    rank: int  # the other one
    latency: float  # seconds of one way
    rate: float  # bytes per second
    clock: float  # seconds by which the other rank's clock is ahead


@dataclass(frozen=True)
class Examination:
    """The facts of all ranks, and what happened when they worked together."""

    size: int  # expected number of ranks
    ranks: tuple[Facts, ...]  # those that arrived
    links: tuple[Link, ...] = ()
    where: str = ""  # the address of the rendezvous
    failure: str = ""  # why the ranks could not work together
    failed_at: str = "work"  # or "start" or "meet"
    timeout: float = 30.0
    port: int | None = None  # the port to give torchrun; None under torchrun
    blocked: str = ""  # why the port cannot be bound

    @classmethod
    def from_dict(cls, examined: Mapping[str, Any]) -> "Examination":
        """Reads an examination from parsed JSON. It ignores fields of ranks that it does not know, because other hosts
        may have a newer release.

        Args:
            examined: what ``examine`` returned.
        """
        names = {f.name for f in fields(Facts)}
        ranks = []
        for row in examined["ranks"]:
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items() if k in names}
            ranks.append(Facts(**values))
        links = (Link(**row) for row in examined.get("links", ()))
        return cls(**{**examined, "ranks": _short_host_names(ranks), "links": tuple(links)})

    @property
    def hosts(self) -> dict[str, list[Facts]]:
        """The facts of the ranks that arrived, by host."""
        by_host: dict[str, list[Facts]] = {}
        for facts in self.ranks:
            by_host.setdefault(facts.host, []).append(facts)
        return by_host

    @property
    def absent(self) -> list[int]:
        """The ranks that did not arrive."""
        return sorted(set(range(self.size)) - {facts.rank for facts in self.ranks})

    @property
    def met(self) -> bool:
        """Whether all ranks arrived and worked together."""
        return not self.absent and not self.failure

    @property
    def several_hosts(self) -> bool:
        """Whether the run has more than one host, also if only ranks of one arrived."""
        return len(self.hosts) > 1 or any(self.size > facts.local_ranks for facts in self.ranks)


def _short_host_names(ranks: Sequence[Facts]) -> tuple[Facts, ...]:
    """Drops the node numbers from host names that are unique without them, which reads better."""
    names = {facts.host: facts.host.partition(" (node ")[0] for facts in ranks}
    if len(set(names.values())) < len(names):
        return tuple(ranks)
    return tuple(replace(facts, host=names[facts.host]) for facts in ranks)
