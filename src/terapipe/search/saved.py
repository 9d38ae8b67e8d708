"""A plan as a file: with its layout and all that its predicted step time rests on, so that both can be had again."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from terapipe.planning.hardware import Cluster, Device, Host, Link
from terapipe.planning.layout import Layout
from terapipe.planning.profile import Profile
from terapipe.planning.slices import PLANNED, Plan
from terapipe.presets import GPTConfig
from terapipe.search.source import ClusterSource, ProfileSource, Source


@dataclass(frozen=True)
class SavedPlan:
    """``Plan.from_json`` reads the same file and takes the plan alone. Of a bare plan only that is known."""

    plan: Plan
    layout: Layout | None = None
    dtype: str | None = None  # of parameters and activations; None where the costs do not say
    costs: Mapping[str, Any] = field(default_factory=dict)  # where they came from: see ``origin``
    budget: int | None = None  # bytes of a device
    step_time: float | None = None

    def to_json(self) -> str:
        known = {"dtype": self.dtype, "costs": dict(self.costs), "budget": self.budget, "step_time": self.step_time}
        layout = None if self.layout is None else asdict(self.layout)
        return json.dumps({**self.plan.to_dict(), PLANNED: {"layout": layout, **known}})

    @classmethod
    def from_json(cls, text: str) -> Self:
        plan = Plan.from_json(text)
        known = json.loads(text).get(PLANNED)
        if known is None:
            return cls(plan)
        try:
            layout = None if known["layout"] is None else Layout(**known["layout"])
            saved = cls(plan, layout, known["dtype"], known["costs"], known["budget"], known["step_time"])
            numbers = [] if layout is None else [layout.dp, layout.pp, layout.tp]
            if any(not isinstance(n, int) or n < 1 for n in numbers) or not isinstance(saved.costs, Mapping):
                raise TypeError("a layout of whole numbers")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"what was saved beside this plan lacks or misnames {error}; plan again") from None
        if layout is not None and layout.pp != plan.num_ranks:
            raise ValueError(f"the plan is for {plan.num_ranks} ranks, its layout has pipe {layout.pp}; plan again")
        return saved

    def source(self) -> Source:
        """The source of its costs as it was when the plan was made; ValueError says what is missing."""
        if "cluster" in self.costs:
            return _cluster_source(self.costs)
        if "profile" in self.costs:
            return _profile_source(self.costs)
        why = "came from a cost table" if "cost_table" in self.costs else "are not in the file"
        raise ValueError(f"the costs of this plan {why}; give a cluster and a model, or a profile")


def origin(source: Source, file: Path | None = None) -> dict[str, Any]:
    """What it takes to have the same costs again. A described cluster in full; of a profile its file and checksum."""
    if isinstance(source, ClusterSource):
        host = asdict(source.cluster.host)
        known = {"cluster": source.cluster.name, "hosts": source.cluster.hosts, "host": host}
        return {**known, "model": asdict(source.config), "layers_only": not source.ends}
    assert isinstance(source, ProfileSource)
    return {"profile": str(file or ""), "checksum": _checksum(source.profile), "ranks": source.ranks, "tp": source.tp}


def _checksum(profile: Profile) -> int:
    return zlib.crc32(profile.to_json().encode())


def _cluster_source(costs: Mapping[str, Any]) -> ClusterSource:
    try:
        host = dict(costs["host"])
        device, intra_node, inter_node = (_numbers(host.pop(name)) for name in ("device", "intra_node", "inter_node"))
        made = Host(Device(**device), intra_node=Link(**intra_node), inter_node=Link(**inter_node), **_numbers(host))
        config = GPTConfig(**costs["model"])
        return ClusterSource(config, Cluster(costs["cluster"], made, costs["hosts"]), not costs["layers_only"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the saved description of the cluster lacks or misnames {error}; plan again") from None


def _numbers(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of a device, a link or a host; what is divided by is not 0."""
    for name, value in values.items():
        positive = name in ("peak", "achieved", "bandwidth", "memory", "devices", "element")
        if not isinstance(value, int | float) or not (value > 0 if positive else value >= 0):
            raise ValueError(f"{name}, which is {value!r}")
    return values


def _profile_source(costs: Mapping[str, Any]) -> ProfileSource:
    path = Path(str(costs["profile"]))
    if not path.is_file():
        raise ValueError(f"the costs of this plan came from the profile {path}, which is not here; give the profile")
    profile = Profile.from_json(path.read_text(encoding="utf-8"))
    if _checksum(profile) != costs.get("checksum"):
        raise ValueError(f"{path} has changed since this plan was made with it; plan again, or give the profile")
    ranks = costs.get("ranks")
    tp = costs.get("tp", 1)
    return ProfileSource(profile, ranks if isinstance(ranks, int) and ranks > 0 else profile.ranks, tp)
