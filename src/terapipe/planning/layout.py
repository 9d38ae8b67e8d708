"""How the devices of a cluster are shared out: replicas, stages, operators."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How many replicas, stages' ranks, and devices to each operator."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.pipe * self.tensor

    def __str__(self) -> str:
        return f"data {self.data} x pipe {self.pipe} x tensor {self.tensor}"
