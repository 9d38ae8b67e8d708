"""What was found out about machines and their links, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Facts:
    """One rank and its surroundings. A field that is added later needs a default: hosts may differ in release."""

    rank: int
    host: str
    addresses: tuple[str, ...]  # of the host's own name, none if it has none
    local_ranks: int
    versions: Mapping[str, str]
    needs: Mapping[str, str]  # by the same names, such as "<3,>=2.9"
    gloo: bool
    nccl: bool
    gpus: int
    kernels: tuple[str, ...]  # dtypes whose fast attention kernel passed its self-test
    fallbacks: tuple[str, ...]  # of the others: why it did not
    cores: tuple[int, ...]  # that this rank may use
    all_cores: int
    threads: int
    load: float  # of the last minute
    memory: int  # free bytes
    shared_memory: int | None
    files: int | None  # that may be open; None: any number


@dataclass(frozen=True)
class Link:
    """Between the first rank and another one."""

    rank: int
    latency: float
    rate: float  # bytes per second
    clock: float  # how far the other's clock is ahead


@dataclass(frozen=True)
class Examination:
    """All that was found out."""

    size: int  # ranks that should be there
    ranks: tuple[Facts, ...]  # those that came
    links: tuple[Link, ...] = ()
    where: str = ""  # the address of the rendezvous
    failure: str = ""  # why no work could be done together
    failed_at: str = "work"  # or when they should "start", or "meet"
    timeout: float = 30.0
    port: int | None = None  # that torchrun would be given; None where it has begun already
    blocked: str = ""  # why that port cannot be bound

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Examination":
        """From what went through JSON."""
        known = {f.name for f in fields(Facts)}
        ranks = []
        for row in found["ranks"]:
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items() if k in known}
            ranks.append(Facts(**values))
        links = (Link(**row) for row in found.get("links", ()))
        return cls(**{**found, "ranks": _briefly(ranks), "links": tuple(links)})

    @property
    def hosts(self) -> dict[str, list[Facts]]:
        found: dict[str, list[Facts]] = {}
        for facts in self.ranks:
            found.setdefault(facts.host, []).append(facts)
        return found

    @property
    def absent(self) -> list[int]:
        return sorted(set(range(self.size)) - {facts.rank for facts in self.ranks})

    @property
    def met(self) -> bool:
        return not self.absent and not self.failure

    @property
    def several_hosts(self) -> bool:
        return len(self.hosts) > 1 or any(self.size > facts.local_ranks for facts in self.ranks)


def _briefly(ranks: Sequence[Facts]) -> tuple[Facts, ...]:
    """Without the numbers of hosts, where their names are enough to tell them apart."""
    names = {facts.host: facts.host.partition(" (node ")[0] for facts in ranks}
    if len(set(names.values())) < len(names):
        return tuple(ranks)
    return tuple(replace(facts, host=names[facts.host]) for facts in ranks)
