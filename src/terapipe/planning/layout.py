"""How the devices of a cluster are shared out: replicas, stages, operators."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How many replicas, stages' ranks, and devices to each operator; whether replicas share out their state."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    shard: bool = False

    @property
    def devices(self) -> int:
        return self.data * self.pipe * self.tensor

    def __str__(self) -> str:
        shared = " (sharded)" if self.shard else ""
        return f"data {self.data}{shared} x pipe {self.pipe} x tensor {self.tensor}"

    @property
    def sharers(self) -> int:
        """Replicas among which parameters, gradients and the optimizer's state are shared out between steps."""
        return self.data if self.shard else 1
