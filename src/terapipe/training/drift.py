"""Whether steps still take the time that was predicted."""

from collections import deque
from statistics import median

from terapipe.config import PlanConfig

RECENT = 20  # steps whose median counts, and after which it is looked at
SETTLING = 3  # first steps, which are slower


class Drift:
    """Says so once: after that there is nothing new to say until there is another plan."""

    def __init__(self, predicted: float | None, config: PlanConfig) -> None:
        self._predicted, self._config = predicted, config
        self._times: deque[float] = deque(maxlen=RECENT)
        self._steps = 0
        self.seen = False

    def due(self, seconds: float) -> bool:
        """Takes the time of another step. Whether to look, the same on all ranks."""
        self._steps += 1
        if self._steps > SETTLING:
            self._times.append(seconds)
        known = self._predicted is not None and self._config.drift > 0 and not self.seen
        return known and self._steps % RECENT == 0

    @property
    def ratio(self) -> float:
        """Of the measured to the predicted."""
        assert self._predicted is not None
        return median(self._times) / self._predicted

    def judge(self, ratio: float) -> str:
        if abs(ratio - 1.0) <= self._config.drift:
            return ""
        self.seen = True
        then = (
            "measuring again at the next checkpoint" if self._config.replan else "plan.replan = true would plan again"
        )
        return f"steps take {ratio:.2f} x the predicted {self._predicted:.3g} s; {then}"
