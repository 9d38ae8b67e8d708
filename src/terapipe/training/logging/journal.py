"""Where a run's rows go: to the display and the files of the first rank; other ranks have nothing to say."""

from collections.abc import Mapping
from typing import Any

from terapipe.training.logging.display import Display
from terapipe.training.logging.metrics import Metrics


class Journal:
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
