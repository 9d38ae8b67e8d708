"""Sensitivity to the cost model: plans made with a wrong constant, evaluated with the right one."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from terapipe.planning.device import Link
from terapipe.planning.hardware import Host
from terapipe.search.choose import choose
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource

FACTORS = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)


class Sensitivity(NamedTuple):
    """How much a plan suffers if a constant of the cluster is assumed to be ``factor`` times its true value."""

    constant: str
    factor: float
    chosen: PlanEstimate  # chosen with the wrong value, evaluated with the true one
    regret: float  # relative increase of the step time over that of the right choice
    same: bool  # whether the choice agrees in layout, order, chunks, recomputation and whether it slices


def sensitivities(source: ClusterSource, request: Request) -> Iterator[Sensitivity]:
    """Plans with every constant multiplied by every factor, one at a time, and what that costs.

    Args:
        source: A described cluster, whose constants are taken as true.
        request: The batch, and what the user has fixed.
    """
    right = choose(source, request).estimate
    for constant in CONSTANTS:
        for factor in FACTORS:
            host = wrong_host(source.cluster.host, constant, factor)
            wrong = replace(source, cluster=replace(source.cluster, host=host))
            misled = choose(wrong, request).estimate
            evaluated = PlanEvaluator(source, request, misled.layout, "none").evaluate(misled.plan)
            yield Sensitivity(
                constant, factor, evaluated, evaluated.step_time / right.step_time - 1, _kind(evaluated) == _kind(right)
            )


CONSTANTS = ("speed of arithmetic", "overhead per layer", "memory bandwidth", "links inside", "links outside")


def wrong_host(host: Host, constant: str, factor: float) -> Host:
    """The host with one constant multiplied by a factor.

    Args:
        host: The true host.
        constant: One of ``CONSTANTS``.
        factor: What to multiply it by.
    """
    device = host.device
    if constant == "speed of arithmetic":
        return replace(host, device=replace(device, peak=device.peak * factor))
    if constant == "overhead per layer":
        names = ("layer_overhead", "min_layer_time", "host_forward", "host_backward", "host_action", "host_message")
        return replace(host, device=replace(device, **{name: getattr(device, name) * factor for name in names}))
    if constant == "memory bandwidth":
        return replace(host, device=replace(device, bandwidth=device.bandwidth * factor))
    if constant == "links inside":
        return replace(host, intra_node=Link(host.intra_node.bandwidth * factor, host.intra_node.latency))
    return replace(host, inter_node=Link(host.inter_node.bandwidth * factor, host.inter_node.latency))


def _kind(estimate: PlanEstimate) -> tuple[object, ...]:
    plan = estimate.plan
    return estimate.layout, plan.order, plan.chunks, plan.recompute_modes, estimate.sliced
