"""Parameters that the first and the last stage share, such as an embedding that is also the head.

Each stage has its own copy. Copies stay equal because their gradients are summed after every step and any optimizer
then treats them alike.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from terapipe.modeling.dtensor import to_local
from terapipe.planning.slices import Plan
from terapipe.runtime.comm.transport import Transport
from terapipe.runtime.inputs import Terms


class TiedWeights:
    """This rank's copies of one parameter that has several ``names`` in the whole model; there may be none."""

    def __init__(
        self, names: tuple[str, ...], stages: Mapping[int, nn.Module], plan: Plan, transport: Transport
    ) -> None:
        self.names, self._transport = names, transport
        self._first_rank, self._last_rank = 0, plan.last_rank
        ends = sorted({0, plan.num_stages - 1} & set(stages))
        held = [p for k in ends for name, p in stages[k].named_parameters() if name in names]
        self.parameters: list[nn.Parameter] = list(dict.fromkeys(held)) if plan.num_stages > 1 else []

    @property
    def trained(self) -> int:
        """How many of the copies are not frozen."""
        return sum(p.requires_grad for p in self.parameters)

    @property
    def duplicates(self) -> list[nn.Parameter]:
        """Copies that must not be counted again where the whole model is summed over."""
        here = self._transport.rank
        return self.parameters if here == self._last_rank and here != self._first_rank else self.parameters[1:]

    def canonical(self, name: str) -> str:
        """The one name that checkpoints have for all copies."""
        return self.names[0] if name in self.names else name

    def check_frozen(self, terms: Sequence[Terms]) -> None:
        """Refuses copies of which some are frozen and others not, on all ranks alike."""
        if 0 < sum(t.trained for t in terms) < sum(t.tied for t in terms):
            raise ValueError(
                f"{' and '.join(self.names)} are one parameter, which must be frozen under all its names or under "
                "none; call requires_grad_ on the first and on the last stage alike"
            )

    def sum_gradients(self) -> None:
        """All copies get the sum of their gradients, equal to the last bit."""
        if not self.trained:  # frozen: no gradient, so that no optimizer moves it
            return
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        first, *copies = [to_local(p.grad) for p in self.parameters if p.grad is not None]
        here = self._transport.rank
        if self._first_rank == self._last_rank:
            for copy in copies:
                first += copy
        else:
            other = self._last_rank if here == self._first_rank else self._first_rank
            first.copy_(self._transport.channel.exchange(first, other))
        for copy in copies:
            copy.copy_(first)
