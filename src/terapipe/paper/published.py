"""What was published: Li et al., TeraPipe, ICML 2021 (arXiv 2102.07988). Times read off drawings to about 0.5 ms."""

from dataclasses import dataclass

from terapipe.planning.layout import Layout

TOKENS = 2048

# Forward of one layer of GPT3-1B on one V100, milliseconds by tokens (figure 3).
ONE_LAYER = {8: 1.458, 128: 1.492, 256: 1.482, 512: 1.726, 768: 1.960, 1024: 2.542}


@dataclass(frozen=True)
class Setting:
    """One row of the main table: seconds of a step without and with slices along tokens."""

    number: int
    model: str
    hosts: int  # p3.16xlarge
    batch_size: int
    layout: Layout
    without: float
    sliced: float
    scheme: tuple[int, ...] | None = None  # the published slices of one microbatch of one sequence, if any

    @property
    def speedup(self) -> float:
        return self.without / self.sliced


SETTINGS = (
    Setting(1, "gpt3-1b", 24, 128, Layout(8, 24, 1), 1.517, 1.254),
    Setting(2, "gpt3-1b", 24, 72, Layout(2, 12, 8), 1.018, 1.018, (TOKENS,)),
    Setting(3, "gpt3-1b", 24, 72, Layout(1, 24, 8), 0.913, 0.913, (TOKENS,)),
    Setting(4, "gpt3-13b", 40, 32, Layout(2, 20, 8), 2.637, 1.891),
    Setting(5, "gpt3-13b", 40, 32, Layout(1, 40, 8), 1.863, 1.328, (704, 688, 656)),
    Setting(6, "gpt3-44b", 48, 8, Layout(4, 96, 1), 13.319, 7.103),
    Setting(7, "gpt3-44b", 48, 8, Layout(2, 24, 8), 4.311, 2.771),
    Setting(8, "gpt3-44b", 48, 8, Layout(1, 48, 8), 2.662, 1.111, (384, 384, 368, 320, 296, 296)),
    Setting(9, "gpt3-175b", 48, 2, Layout(1, 96, 4), 9.990, 1.481, (120,) * 4 + (112,) * 6 + (104,) * 8 + (64,)),
    Setting(10, "gpt3-175b", 48, 2, Layout(1, 48, 8), 5.822, 1.160),
)

# Setting 9 with equal slices: seconds by number of slices per sequence.
SWEEP = {1: 9.990, 4: 2.902, 8: 1.892, 16: 1.547, 32: 1.593, 64: 2.227, 128: 3.252}
SWEPT = 9
