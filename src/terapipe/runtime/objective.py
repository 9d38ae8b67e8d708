"""The objective of a pipeline: whether model and plan can follow it, and what it found in the last step."""

import inspect
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from terapipe.losses.objective import HiddenLoss, Objective, SequenceLoss
from terapipe.modeling.stage import Stage
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.mesh import ALL
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.inputs import Batch
from terapipe.runtime.loss_head import SequenceLosses, TokenLosses, default_loss, logits, output_head_for, try_out
from terapipe.scheduling.validation import forwards_come_first


class PipelineObjective:
    def __init__(
        self, objective: Objective | None, stages: dict[int, Stage], plan: Plan, transport: Transport, shard: bool
    ) -> None:
        self.objective, self._transport = objective, transport
        self._stages, self._last = stages, stages.get(plan.num_stages - 1)
        self.output_head: TokenLosses | SequenceLosses = output_head_for(objective)
        # Where operators or parameters are split, a head cannot be called by one rank alone.
        self._untried = objective is not None and transport.tp_size == 1 and not shard
        if objective is not None:
            self._check_kind()
        elif self._last is not None and self._last.no_default_loss:
            raise ValueError(self._last.no_default_loss)
        self.check_plan(plan)
        self._check_tokens()
        self._metrics: dict[str, Tensor] = {}  # of the last step or evaluation

    def _check_tokens(self) -> None:
        parts = self._transport.tp_size
        named, stage = list(self._first.auxiliary_losses), self._first
        if named and parts > 1 and stage.hidden_shape(1, parts)[1] < parts:
            raise ValueError(
                f"sums of auxiliary losses ({', '.join(named)}) are of all tokens, which tensor parallel ranks of this "
                f"model share out; take tp 1, or slice lengths that are no multiples of {parts}"
            )

    def _check_kind(self) -> None:
        is_hidden = isinstance(self.objective, HiddenLoss)
        if not is_hidden and not isinstance(self.objective, SequenceLoss) and not callable(self.objective):
            raise ValueError(
                "loss_fn must be a function (logits, targets), a HiddenLoss or a SequenceLoss, got "
                f"{type(self.objective).__name__}"
            )
        _refuse_maker(self.objective)
        if is_hidden and self._transport.tp_size > 1:
            raise ValueError("a HiddenLoss needs the head in one piece, which tensor parallel splits; take tp 1")
        if self._last is None:
            return
        if not self._last.offers("before_head" if is_hidden else "logits"):
            method = "before_head(hidden)" if is_hidden else "logits(hidden)"
            raise ValueError(
                f"this objective needs a last stage with a method {method}, {type(self._last).__name__} has none"
            )

    def check_plan(self, plan: Plan) -> None:
        """All ranks check the whole plan, so that all refuse it."""
        wanting = [name for name, loss in self._first.auxiliary_losses.items() if loss.over != "microbatch"]
        if isinstance(self.objective, SequenceLoss) and self.objective.over == "batch":
            wanting.append("loss_fn")
        if wanting and not forwards_come_first(plan):
            raise ValueError(
                f"{' and '.join(wanting)} {'needs' if len(wanting) == 1 else 'need'} the whole batch before the first "
                f"backward, which the order {plan.order!r} does not wait for with {len(plan.sizes)} microbatches; take "
                "over='microbatch', an order such as 'terapipe' or 'gpipe', or a plan with one microbatch"
            )

    def check_outputs(self, plan: Plan) -> None:
        """Whether backwards can wait for gradients from outside."""
        named = list(self._first.auxiliary_losses)
        if named:
            raise ValueError(
                f"token_outputs does not know what the model's own losses ({', '.join(named)}) weigh beside a loss of "
                "its outputs; turn them off (output_router_logits=False), or use step"
            )
        if not forwards_come_first(plan):
            raise ValueError(
                f"token_outputs needs all forwards before the first backward, which the order {plan.order!r} does not "
                f"wait for with {len(plan.sizes)} microbatches; take an order such as 'terapipe' or 'gpipe'"
            )

    @property
    def _first(self) -> Stage:
        return next(iter(self._stages.values()))

    def try_out(self, batch: Batch, dtype: torch.dtype, *, train: bool) -> None:
        """Before the first step, where the last stage is."""
        if self._untried and self._last is not None:
            try_out(self.output_head, self._last, batch, dtype, train=train)
            self._untried = not train

    @property
    def made_up(self) -> TokenLosses:
        """For a step on made-up numbers without targets."""
        if self.objective is None:
            return TokenLosses(default_loss)
        return TokenLosses(lambda stage, hidden, targets: logits(stage, hidden).sum())

    def keep(self, metrics: dict[str, Tensor]) -> None:
        """What a step or an evaluation found."""
        self._metrics = metrics

    def metrics(self) -> dict[str, float]:
        """Of the last step, summed over replicas, on every rank: each replica's are weighted as its loss is."""
        total: dict[str, float] = {}
        mine = {name: float(value) for name, value in self._metrics.items()} if self._transport.tp_rank == 0 else {}
        for found in self._transport.gather(mine, ALL):
            for name, value in found.items():
                total[name] = total.get(name, 0.0) + value
        return total


def _refuse_maker(objective: Objective | None) -> None:
    """A function that makes an objective, such as ``losses.dpo``, is easily given in place of what it makes."""
    function = objective.fn if isinstance(objective, HiddenLoss | SequenceLoss) else objective
    arguments = (None,) * (3 if isinstance(objective, HiddenLoss) else 2)
    try:
        inspect.signature(cast(Callable[..., object], function)).bind(*arguments)
    except TypeError:
        raise ValueError(
            f"an objective is called with {'(hidden, head, targets)' if len(arguments) > 2 else '(logits, targets)'}, "
            f"which {getattr(function, '__name__', function)} does not take; if it makes a loss function, call it"
        ) from None
    except ValueError:  # built-in functions do not say what they take
        pass
