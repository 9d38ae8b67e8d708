"""Layouts: the number of devices for each kind of parallelism."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Data parallel replicas (``dp``), pipeline ranks (``pp``) and tensor parallel ranks (``tp``).

    With ``shard``, replicas shard their parameters, gradients and optimizer state (FSDP2).
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    shard: bool = False

    @property
    def devices(self) -> int:
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        return f"dp {self.dp}{' (sharded)' if self.shard else ''} x pp {self.pp} x tp {self.tp}"

    @property
    def shards(self) -> int:
        """The number of shards of the model state."""
        return self.dp if self.shard else 1
