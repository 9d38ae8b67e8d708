"""The library's face: a model, a plan, and ``step``."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from terapipe.modeling.stage import IGNORE, Splittable, Stage
from terapipe.planning.slices import Plan
from terapipe.runtime.executor import Executor
from terapipe.runtime.failures import PipelineError, Record
from terapipe.runtime.transport import Transport, local_device
from terapipe.scheduling.orders import schedule
from terapipe.scheduling.timeline import Timeline
from terapipe.scheduling.validation import validate

T = TypeVar("T")


class Pipeline:
    """This process's part of a model that is trained by several, each sequence cut along its tokens.

    ::

        pipe = Pipeline(model, plan)                        # under torchrun; one process per stage
        optimizer = torch.optim.AdamW(pipe.parameters())    # this rank's parameters
        loss = pipe.step(input_ids, labels)                 # gradients are in .grad, as after backward()
        pipe.clip_grad_norm_(1.0)
        optimizer.step()

    ``mesh`` is a one-dimensional DeviceMesh of the ranks that form the pipeline, by default all of them. ``timeout`` is
    the longest, in seconds, that a rank waits for another before the step fails on all of them.
    """

    def __init__(
        self,
        model: Splittable,
        plan: Plan,
        *,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.plan = plan
        self.device = local_device() if device is None else torch.device(device)
        self._transport = Transport(self.device, mesh, timeout)
        self._executor: Executor | None = None
        with self._telling_others():
            self._check(model)
            self.schedule = schedule(plan)
            validate(self.schedule)
            cuts = plan.boundaries
            self.stages: dict[int, nn.Module] = {
                k: model.stage(cuts[k], cuts[k + 1], self.device) for k in plan.stages_of(self.rank)
            }
            self._tied = self._tied_parameters(model)
            stages = {k: cast(Stage, stage) for k, stage in self.stages.items()}
            self._executor = Executor(stages, self.schedule, self._transport, self._dtype)

    def _check(self, model: Splittable) -> None:
        if self.plan.num_layers != model.num_layers:
            raise ValueError(
                f"the plan splits {self.plan.num_layers} layers, the model has {model.num_layers}; "
                "the last of the plan's boundaries must be the number of layers"
            )
        size, ranks = self._transport.size, self.plan.num_ranks
        if size != ranks:
            raise ValueError(
                f"the plan is for {ranks} ranks ({self.plan.num_stages} stages, {self.plan.chunks} per rank), got "
                f"{size} processes; start {ranks} (torchrun --nproc-per-node {ranks}) or make another plan"
            )
        plans = self._transport.gather(self.plan.to_json())
        others = [rank for rank, plan in enumerate(plans) if plan != plans[0]]
        if others:
            raise ValueError(f"all ranks must have the same plan, ranks {others} have another than rank 0")

    def _tied_parameters(self, model: Splittable) -> list[nn.Parameter]:
        """This rank's own copies of the parameters that the first and the last stage share."""
        ends = {0, self.plan.num_stages - 1} & set(self.stages)
        found = [p for k in ends for name, p in self.stages[k].named_parameters() if name in model.tied]
        return list(dict.fromkeys(found)) if self.plan.num_stages > 1 else []

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """An error here stops the other ranks too, with this rank's error."""
        try:
            yield
        except PipelineError:
            raise
        except Exception as error:
            at = self._executor.at if self._executor else None
            self._transport.fail(Record(self.rank, f"{type(error).__name__}: {error}", str(at or "")))
            raise

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def rank(self) -> int:
        """This process's place in the pipeline."""
        return self._transport.rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.rank == self.plan.num_ranks - 1

    # Training

    def step(self, input_ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """Forward and backward of one batch. The mean loss over all labels that count, on every rank.

        ``input_ids`` is needed on the first rank and ``labels`` on the last; the others may pass ``None``. Both are
        (batch, tokens) as the plan says; ``labels[b, t]`` is the token to predict at place ``t`` (see
        ``next_token_labels``), or -100 to leave that place out. Gradients are added to ``.grad``.
        """
        earlier = [p.grad for p in self._tied]
        for p in self._tied:
            p.grad = None
        loss = self._run(input_ids, labels, train=True)
        self._sum_tied_gradients()
        for p, grad in zip(self._tied, earlier, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)
        return loss

    def evaluate(self, input_ids: Tensor | None, labels: Tensor | None) -> Tensor:
        """The loss that ``step`` would return, by forwards only. Gradients are left alone."""
        return self._run(input_ids, labels, train=False)

    def _run(self, input_ids: Tensor | None, labels: Tensor | None, *, train: bool) -> Tensor:
        assert self._executor is not None
        with self._telling_others():
            ids = self._batch("input_ids", input_ids) if self.is_first else None
            targets = self._batch("labels", labels) if self.is_last else None
            scale = None if targets is None else self._weight(targets)
            loss = self._executor.run(ids, targets, scale, train=train)
            return self._transport.broadcast(loss, self.plan.num_ranks - 1)

    def _batch(self, name: str, tensor: Tensor | None) -> Tensor:
        shape = (self.plan.batch, self.plan.tokens)
        if tensor is None or tensor.shape != shape or tensor.dtype != torch.int64:
            got = "None" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise ValueError(
                f"{name} on rank {self.rank} must be {shape} of torch.int64, (batch, tokens) of the plan, got {got}"
            )
        return tensor.to(self.device)

    def _weight(self, labels: Tensor) -> Tensor:
        count = (labels != IGNORE).sum()
        if not count:
            raise ValueError(f"at least one label of a batch must count, got only {IGNORE}; leave such a batch out")
        return 1.0 / count.to(torch.promote_types(self._dtype, torch.float32))

    def _sum_tied_gradients(self) -> None:
        if not self._tied:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._tied]
        if self.plan.num_ranks == 1:
            total = sum(grads[1:], grads[0])
        else:
            total = self._transport.exchange(grads[0], self.plan.num_ranks - 1 if self.is_first else 0)
        for p in self._tied:
            p.grad = total if p is self._tied[0] else total.clone()

    # Gradients

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model, on every rank; shared parameters count once."""
        copies = self._tied if self.is_last and self.plan.num_ranks > 1 else self._tied[1:]
        skip = {id(p) for p in copies}
        grads = [p.grad for p in self.parameters() if p.grad is not None and id(p) not in skip]
        norm = nn.utils.get_total_norm(grads, norm_type).to(self.device)
        if math.isinf(norm_type):
            return self._transport.all_reduce(norm, dist.ReduceOp.MAX)
        return self._transport.all_reduce(norm**norm_type) ** (1.0 / norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, over all stages; returns the norm before clipping."""
        norm = self.grad_norm(norm_type)
        nn.utils.clip_grads_with_norm_(list(self.parameters()), max_norm, norm)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        for stage in self.stages.values():
            stage.zero_grad(set_to_none)

    # The modules

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names they have in the whole model, each once."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the whole model's state."""
        return {name: value for stage in self.stages.values() for name, value in stage.state_dict().items()}

    def train(self, mode: bool = True) -> Self:
        for stage in self.stages.values():
            stage.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    # Looking back

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in the order of the pipeline. All ranks must call it together."""
        return self._transport.gather(value)

    def timeline(self) -> Timeline:
        """What every rank did in the last step, and when. All ranks must call it together."""
        assert self._executor is not None
        events = self.gather(self._executor.events())
        return Timeline.of(self.plan, [event for rank in events for event in rank])
