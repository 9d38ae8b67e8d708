"""An Order: everything the rest of the library knows about one way to order a pipeline's computations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from terapipe.planning.slices import Plan


class InFlight(NamedTuple):
    """What an estimate of activation memory may depend on."""

    microbatches: int
    slices: int  # per microbatch
    ranks: int
    chunks: int


def all_microbatches(work: InFlight) -> float:
    """Orders that run every forward before the first backward hold the whole batch."""
    return float(work.microbatches)


@dataclass(frozen=True)
class Order:
    """One entry of ``ORDERS``. Adding an order takes a ``build`` function and a call of ``register``.

    The last five fields only guide the search; a wrong estimate costs planning time or a good plan, never exactness.
    """

    name: str  # as in Plan.order and on the command line
    title: str  # for people
    build: Callable[["Plan"], Any]  # the computations (Action) of each rank, in order; pure
    sliced: bool = True  # whether microbatches may be cut into slices
    placement: Literal["loop", "v"] = "loop"  # v: every second chunk of stages goes through the ranks backwards
    chunks: int | None = None  # stages per rank, where the order takes only that number
    unsliced_twin: str | None = None  # the order that does the same with whole sequences
    one_rank: bool = False  # whether to take it on one rank, where all orders take the same time
    tried_chunks: tuple[int, ...] = (1,)  # stages per rank that the search tries
    bubble: float = 1.0  # idle time relative to a flush: (ranks - 1) slices divided by the chunks
    in_flight: Callable[[InFlight], float] = all_microbatches  # microbatches whose activations are held at the peak

    def check(self, plan: "Plan") -> None:
        """Raises ValueError if the order does not take such a plan."""
        counts = [len(row) for row in plan.lengths]
        if not self.sliced and max(counts) > 1:
            clone = next((order.name for order in ORDERS.values() if order.unsliced_twin == self.name), "terapipe")
            raise ValueError(f"order {self.name!r} takes one slice per microbatch, got {counts}; use order {clone!r}")
        if self.chunks not in (None, plan.chunks):
            raise ValueError(
                f"order {self.name!r} takes {self.chunks} chunks of layers per rank, got {plan.chunks}; set chunks to "
                f"{self.chunks} or use order 'interleaved', which takes any number"
            )


ORDERS: dict[str, Order] = {}  # filled by scheduling/orders.py, which importing terapipe always loads
"""Every order that a plan may name, by its name."""


def register(order: Order) -> Order:
    """Makes an order known by its name, to ``Plan`` and to the planner."""
    if order.name in ORDERS:
        raise ValueError(f"there is an order {order.name!r} already; choose another name")
    ORDERS[order.name] = order
    return order


def order_named(name: str) -> Order:
    try:
        return ORDERS[name]
    except (KeyError, TypeError):
        raise ValueError(f"unknown order {name!r}; the orders are {', '.join(ORDERS)}") from None
