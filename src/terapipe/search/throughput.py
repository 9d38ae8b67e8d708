"""What a way to train means to whoever pays for it: tokens per second and day, utilization, days, and money."""

import re

from terapipe.search.source import ClusterSource, Source

DAY = 86400.0  # seconds
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_tokens(text: str | float) -> float:
    """A number of tokens, as papers write it: ``50B``, ``1.5T``, ``300M``; or a plain number.

    Args:
        text: The number. It must be positive.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)([KMBT]?)", str(text).strip())
    tokens = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < tokens < float("inf"):
        raise ValueError(f"a number of tokens reads like 50B, 1.5T, 300M or 50000000000, got {text!r}")
    return tokens


def step_flops(source: Source, batch_size: int, seq_len: int) -> float | None:
    """FLOPs that a step needs, however it is computed: the numerator of MFU.

    A backward has twice the FLOPs of its forward. Causal attention counts the pairs that a token sees, half of the
    square; what is computed twice (recomputation, masked blocks) does not count.

    Args:
        source: Model and devices.
        batch_size: Sequences per step, over all replicas.
        seq_len: Tokens of each.

    Returns:
        None if the source does not describe its devices: a measured profile knows seconds, not a peak.
    """
    if not isinstance(source, ClusterSource):
        return None
    config = source.config
    head = config.head_flops(seq_len) if source.ends else 0.0
    return 3.0 * batch_size * (config.layers * config.layer_flops(seq_len) + head)


class Throughput:
    """The answers that follow from a step's time. Plans (`PlanEstimate`) and their rivals (`Rival`) have them.

    >>> best = terapipe.plan("llama3-8b", "dgx-h100:2", batch_size=16, seq_len=8192).estimate
    >>> best.mfu, best.days("50B"), best.cost("50B", price=2.5)
    """

    step_time: float  # seconds

    @property
    def devices(self) -> int:
        """Devices that are paid for, whether they have work or not."""
        raise NotImplementedError

    @property
    def batch(self) -> tuple[int, int]:
        """Sequences per step over all replicas, and tokens of each."""
        raise NotImplementedError

    @property
    def costs(self) -> Source | None:
        """Where the step's time comes from; None if nobody knows any more."""
        raise NotImplementedError

    @property
    def tokens_per_second(self) -> float:
        """The throughput of all replicas together."""
        batch_size, seq_len = self.batch
        return batch_size * seq_len / self.step_time

    @property
    def tokens_per_day(self) -> float:
        """The same for a day without interruptions."""
        return self.tokens_per_second * DAY

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the FLOPs that the model needs (``step_flops``) as a share of what all devices could
        compute in a step by their data sheets. None for measured costs, which have no data sheet."""
        source = self.costs
        if not isinstance(source, ClusterSource):
            return None
        flops = step_flops(source, *self.batch)
        return None if flops is None else flops / (self.step_time * self.devices * source.cluster.host.device.peak)

    def days(self, tokens: str | float) -> float:
        """Days of training, without interruptions.

        Args:
            tokens: Such as ``"50B"`` or ``50e9``.
        """
        return parse_tokens(tokens) / self.tokens_per_day

    def cost(self, tokens: str | float, price: float) -> float:
        """What the devices cost until so many tokens are trained on, in the currency of the price.

        Args:
            tokens: Such as ``"50B"`` or ``50e9``.
            price: Of one device for one hour.
        """
        return self.days(tokens) * 24 * self.devices * price
