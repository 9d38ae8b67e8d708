"""The log of a run: rows of named values for the display and the metrics files."""

from collections.abc import Mapping
from typing import Any

from terapipe.training.logging.display import Display
from terapipe.training.logging.metrics import Metrics


class RunLog:
    """Rank 0 has a display and metrics files. On other ranks, rows are dropped."""

    def __init__(self, display: Display | None = None, metrics: Metrics | None = None) -> None:
        self._display, self._metrics = display, metrics

    @property
    def is_main(self) -> bool:
        return self._metrics is not None

    def row(self, row: Mapping[str, Any]) -> None:
        if self._display is not None:
            self._display.row(row)
        if self._metrics is not None:
            self._metrics.write(row)
