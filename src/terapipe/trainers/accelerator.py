"""accelerate's Accelerator, told of replicas only: ranks of a pipeline have the same batch, and act as one process."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import TorchDynamoPlugin, pad_across_processes, recursively_apply  # type: ignore[import-untyped]
from torch import Tensor, nn

from terapipe.planning.layout import Layout
from terapipe.trainers.model import PipelinedModel


class PipelineAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator whose processes are replicas.

    Trainer asks its Accelerator how many processes there are, to share out data among them, and to gather results. With
    4 ranks in 2 replicas of 2 stages:

        rank              0  1  2  3
        process_index     0  0  1  1     ranks of a replica read the same batch
        gather            each replica's values once, from one rank of each

    The class of an Accelerator that exists is changed (``adopt``), because Trainer makes it itself, from arguments that
    subclasses change.
    """

    layout: Layout
    replica: int
    _group: dist.ProcessGroup | None
    pipelined: PipelinedModel | None

    @classmethod
    def adopt(cls, accelerator: Accelerator, layout: Layout, group: dist.ProcessGroup | None) -> None:
        """Makes one of an Accelerator.

        Args:
            accelerator: Which Trainer made.
            layout: Of all ranks.
            group: The same rank of all replicas; None if there is one replica.
        """
        accelerator.__class__ = cls
        accelerator.layout, accelerator._group, accelerator.pipelined = layout, group, None
        accelerator.replica = 0 if group is None else dist.get_rank(group)

    @property
    def num_processes(self) -> int:
        """Replicas."""
        return self.layout.dp

    @property
    def process_index(self) -> int:
        """The number of this rank's replica."""
        return self.replica

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The pipelined model stays where its pipeline put it, and nothing is wrapped around it but autocast: its
        layers are compiled, if at all, when the pipeline is made."""
        own = self.pipelined is not None and model is self.pipelined.outer
        placed, plugin = False if own else device_placement, self.state.dynamo_plugin
        self.state.dynamo_plugin = TorchDynamoPlugin(backend="no")
        try:
            return super().prepare_model(model, device_placement=placed, evaluation_mode=True)  # type: ignore[no-any-return]
        finally:
            self.state.dynamo_plugin = plugin

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """By the norm over all stages; accelerate's would clip each stage by its own."""
        assert self.pipelined is not None
        return self.pipelined.pipe.clip_grad_norm_(max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """Tensors of all replicas, one after the other along the first dimension; also in nested lists and dicts."""
        if self._group is None:
            return tensor
        return recursively_apply(self._gather_one, tensor, error_on_other_type=True)

    def _gather_one(self, tensor: Tensor) -> Tensor:
        tensor = (tensor if tensor.ndim else tensor[None]).contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.layout.dp)]
        dist.all_gather(parts, tensor, group=self._group)
        return torch.cat(parts)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if self._group is None or reduction == "none":
            return tensor

        def reduce_one(x: Tensor) -> Tensor:
            x = x.clone()
            dist.all_reduce(x, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=self._group)
            return x / self.layout.dp if reduction == "mean" else x

        return recursively_apply(reduce_one, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """To the longest of all ranks, of which those of a pipeline have the same."""
        if self._group is None:
            return tensor
        return pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)
