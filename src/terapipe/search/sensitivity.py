"""How wrong may the cost model be? Plans made with a wrong constant, judged with the right one."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from terapipe.planning.hardware import Host, Link
from terapipe.search.choose import choose
from terapipe.search.evaluator import PlanEstimate, PlanEvaluator
from terapipe.search.request import Request
from terapipe.search.source import ClusterSource

FACTORS = (0.5, 0.7, 0.85, 1.2, 1.4, 2.0)


class Mistake(NamedTuple):
    """A constant taken to be ``factor`` times what it is."""

    constant: str
    factor: float
    chosen: PlanEstimate  # with the mistake, judged without it
    regret: float  # its step time over that of the right choice, less one
    same: bool  # whether order, layout, chunks and recomputation are still those of the right choice


def mistakes(source: ClusterSource, request: Request) -> Iterator[Mistake]:
    """Every constant wrong by every factor, one at a time."""
    right = choose(source, request).estimate
    for constant in CONSTANTS:
        for factor in FACTORS:
            host = wrong_host(source.cluster.host, constant, factor)
            wrong = replace(source, cluster=replace(source.cluster, host=host))
            found = choose(wrong, request).estimate
            evaluated = PlanEvaluator(source, request, found.layout, found.plan.recompute).evaluate(found.plan)
            yield Mistake(
                constant, factor, evaluated, evaluated.step_time / right.step_time - 1, _kind(evaluated) == _kind(right)
            )


CONSTANTS = ("speed of arithmetic", "overhead per layer", "memory bandwidth", "links inside", "links outside")


def wrong_host(host: Host, constant: str, factor: float) -> Host:
    device = host.device
    if constant == "speed of arithmetic":
        return replace(host, device=replace(device, peak=device.peak * factor))
    if constant == "overhead per layer":
        least = device.min_layer_time * factor
        return replace(
            host, device=replace(device, layer_overhead=device.layer_overhead * factor, min_layer_time=least)
        )
    if constant == "memory bandwidth":
        return replace(host, device=replace(device, bandwidth=device.bandwidth * factor))
    if constant == "links inside":
        return replace(host, intra_node=Link(host.intra_node.bandwidth * factor, host.intra_node.latency))
    return replace(host, inter_node=Link(host.inter_node.bandwidth * factor, host.inter_node.latency))


def _kind(choice: PlanEstimate) -> tuple[object, ...]:
    return choice.layout, choice.plan.order, choice.plan.chunks, choice.plan.recompute, choice.sliced
