"""An Order: all that the library knows about one way to order the computations of a pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from terapipe.planning.slices import Plan


class InFlight(NamedTuple):
    """The input of an order's estimate of activation memory."""

    microbatches: int
    slices: int  # per microbatch
    ranks: int
    chunks: int


def all_microbatches(work: InFlight) -> float:
    """For orders that run all forwards before the first backward: they hold the whole batch."""
    return float(work.microbatches)


@dataclass(frozen=True)
class Order:
    """An entry of ``ORDERS``. To add an order, write its ``build`` function and ``register`` it.

    The fields from ``unsliced_twin`` on only guide the search and the cuts of packed batches. If they are wrong,
    planning takes longer or misses a good plan, but the results of training stay exact.

    Attributes:
        name: As in ``Plan.order`` and on the command line.
        title: A name for tables and pictures.
        build: A pure function from a plan to the computations (``Action``) of each rank, in the order in which the rank
            is to do them. Sends and receives follow from them.
        sliced: Whether microbatches may be cut into slices.
        placement: How stages are laid over the ranks where each has several: ``"loop"`` begins again at the first rank,
            ``"v"`` goes back from the last one.
        chunks: The only number of stages per rank that the order supports; None for any.
        unsliced_twin: The name of the same order for whole sequences, if there is one.
        one_rank: Whether the search tries it without a pipeline, too, where all orders take the same time and one
            stands for them.
        tried_chunks: Numbers of stages per rank that the search tries where ``chunks`` is None. ``build`` supports all
            of them.
        bubble: The idle time relative to that of a flush, which is (ranks - 1) / chunks slices.
        in_flight: How many microbatches have live activations at the peak, of an ``InFlight``: a tuple of
            ``microbatches``, ``slices`` of each, ``ranks`` and ``chunks``.
        deferred: Whether weight halves of backwards wait, and keep memory of their own.
        variants: The rows that a comparison shows: ``"whole"`` sequences, ``"equal"`` slices, and slices of any length
            (``"sliced"``).
    """

    name: str
    title: str
    build: Callable[["Plan"], Any]
    sliced: bool = True
    placement: Literal["loop", "v"] = "loop"
    chunks: int | None = None
    unsliced_twin: str | None = None
    one_rank: bool = False
    tried_chunks: tuple[int, ...] = (1,)
    bubble: float = 1.0
    in_flight: Callable[[InFlight], float] = all_microbatches
    deferred: bool = False
    variants: tuple[Literal["whole", "equal", "sliced"], ...] = ("whole", "sliced")

    def check(self, plan: "Plan") -> None:
        """Raises ValueError if the order does not support the plan."""
        counts = [len(row) for row in plan.lengths]
        if not self.sliced and max(counts) > 1:
            sliced = next((order.name for order in ORDERS.values() if order.unsliced_twin == self.name), "terapipe")
            raise ValueError(f"order {self.name!r} takes one slice per microbatch, got {counts}; use order {sliced!r}")
        if self.chunks not in (None, plan.chunks):
            raise ValueError(
                f"order {self.name!r} takes {self.chunks} chunks of layers per rank, got {plan.chunks}; set chunks to "
                f"{self.chunks} or use order 'interleaved', which takes any number"
            )


ORDERS: dict[str, Order] = {}  # filled by scheduling/orders.py, which importing terapipe always loads
"""Every order that a plan may name, by its name."""


def register(order: Order) -> Order:
    """Adds an order to ``ORDERS``, so that plans may name it and the planner tries it.

    Args:
        order: The order. Its name must be new.
    """
    if order.name in ORDERS:
        raise ValueError(f"there is an order {order.name!r} already; choose another name")
    ORDERS[order.name] = order
    return order


def order_named(name: str) -> Order:
    """The order of this name. A ValueError lists the names that there are."""
    try:
        return ORDERS[name]
    except (KeyError, TypeError):
        likely = get_close_matches(str(name), ORDERS, 1)
        hint = f"did you mean {likely[0]!r}? " if likely else ""
        raise ValueError(f"unknown order {name!r}; {hint}the orders are {', '.join(ORDERS)}") from None
