"""A plan as a file, with its layout and the costs behind its predicted step time, so that it can be simulated again."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from terapipe import files
from terapipe.planning.hardware import Cluster, Device, Host, Link
from terapipe.planning.layout import Layout
from terapipe.planning.presets import GPTConfig
from terapipe.planning.profile import Profile
from terapipe.planning.slices import PLANNED, Plan
from terapipe.search.source import ClusterSource, ProfileSource, Source


@dataclass(frozen=True)
class SavedPlan:
    """What ``PlanResult.save`` writes. ``Plan.from_json`` reads the same file and returns only the plan.

    A file that holds a plan alone can also be loaded; the other fields are then None or empty.
    """

    plan: Plan
    layout: Layout | None = None
    dtype: str | None = None  # of parameters and activations; None for plans from a cost table
    costs: Mapping[str, Any] = field(default_factory=dict)  # where the costs came from, see ``origin``
    budget: int | None = None  # bytes per device
    step_time: float | None = None  # predicted seconds

    def to_json(self) -> str:
        details = {"dtype": self.dtype, "costs": dict(self.costs), "budget": self.budget, "step_time": self.step_time}
        layout = None if self.layout is None else asdict(self.layout)
        return json.dumps({**self.plan.to_dict(), PLANNED: {"layout": layout, **details}})

    @classmethod
    def from_json(cls, text: str) -> Self:
        plan = Plan.from_json(text)
        details = json.loads(text).get(PLANNED)
        if details is None:
            return cls(plan)
        try:
            layout = None if details["layout"] is None else Layout(**details["layout"])
            saved = cls(plan, layout, details["dtype"], details["costs"], details["budget"], details["step_time"])
            numbers = [] if layout is None else [layout.dp, layout.pp, layout.tp]
            if any(not isinstance(n, int) or n < 1 for n in numbers) or not isinstance(saved.costs, Mapping):
                raise TypeError("a layout of whole numbers")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"what was saved beside this plan lacks or misnames {error}; plan again") from None
        if layout is not None and layout.pp != plan.num_ranks:
            raise ValueError(f"the plan is for {plan.num_ranks} ranks, its layout has pp={layout.pp}; plan again")
        return saved

    def source(self) -> Source:
        """The costs that the plan was made with. Raises ValueError if the file does not determine them."""
        if "cluster" in self.costs:
            return _cluster_source(self.costs)
        if "profile" in self.costs:
            return _profile_source(self.costs)
        why = "came from a cost table" if "cost_table" in self.costs else "are not in the file"
        raise ValueError(f"the costs of this plan {why}; give a cluster and a model, or a profile")


def origin(source: Source, file: Path | None = None) -> dict[str, Any]:
    """What is saved to restore the costs: the whole description of a cluster, or a profile's path and checksum."""
    if isinstance(source, ClusterSource):
        host = asdict(source.cluster.host)
        cluster = {"cluster": source.cluster.name, "hosts": source.cluster.hosts, "host": host}
        model = {"model": asdict(source.config), "layers_only": not source.ends, "fused_grads": source.fused}
        return {**cluster, **model, "autocast": source.autocast}
    assert isinstance(source, ProfileSource)
    measured = {"profile": str(file or ""), "checksum": _checksum(source.profile)}
    return {**measured, "ranks": source.ranks, "tp": source.tp, "fused_grads": source.fused}


def _checksum(profile: Profile) -> int:
    return zlib.crc32(profile.to_json().encode())


def _cluster_source(costs: Mapping[str, Any]) -> ClusterSource:
    try:
        fields = dict(costs["host"])
        device, intra_node, inter_node = (_numbers(fields.pop(name)) for name in ("device", "intra_node", "inter_node"))
        host = Host(Device(**device), intra_node=Link(**intra_node), inter_node=Link(**inter_node), **_numbers(fields))
        config = GPTConfig(**costs["model"])
        cluster, ends = Cluster(costs["cluster"], host, costs["hosts"]), not costs["layers_only"]
        return ClusterSource(config, cluster, ends, costs.get("fused_grads", True), costs.get("autocast", False))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the saved description of the cluster lacks or misnames {error}; plan again") from None


def _numbers(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Checks the fields of a device, a link or a host. Those that something is divided by must be positive."""
    for name, value in values.items():
        positive = name in ("peak", "achieved", "bandwidth", "memory", "devices", "element")
        if not isinstance(value, int | float) or not (value > 0 if positive else value >= 0):
            raise ValueError(f"{name}, which is {value!r}")
    return values


def _profile_source(costs: Mapping[str, Any]) -> ProfileSource:
    path = Path(str(costs["profile"]))
    if not path.is_file():
        raise ValueError(f"the costs of this plan came from the profile {path}, which is not here; give the profile")
    profile = Profile.from_json(files.read(path))
    if _checksum(profile) != costs.get("checksum"):
        raise ValueError(f"{path} has changed since this plan was made with it; plan again, or give the profile")
    ranks = costs.get("ranks")
    tp = costs.get("tp", 1)
    ranks = ranks if isinstance(ranks, int) and ranks > 0 else profile.ranks
    return ProfileSource(profile, ranks, tp, bool(costs.get("fused_grads", True)))
