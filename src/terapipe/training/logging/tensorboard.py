"""The numbers of a run as TensorBoard's event files."""

import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

from terapipe.training.logging.rows import Row, flat


class TensorBoard:
    name = "TensorBoard"

    def __init__(self, folder: Path, step: int) -> None:
        self._make = import_module("torch.utils.tensorboard").SummaryWriter
        self._folder = folder
        self._purge: int | None = step + 1 if step else 0  # what older files have from there on is hidden
        self._writer: Any = None
        self._pause, self._skip = 10, 0  # rows to let pass after the next failure, and before the next attempt

    def write(self, row: Row) -> None:
        """A writer that failed is dead, and its thread prints why: the next one begins a file of its own, so while a
        disk stays full it is tried ever more seldom."""
        if self._skip:
            self._skip -= 1
            return
        try:
            self._add(row)
        except OSError:
            self._writer, self._skip, self._pause = None, self._pause, 2 * self._pause
            raise

    def _add(self, row: Row) -> None:
        if self._writer is None:
            self._writer = self._make(self._folder, purge_step=self._purge, flush_secs=15)
            self._purge = None
        for name, value in flat(row).items():
            self._writer.add_scalar(name, value, row.get("step"))
        for name, text in _texts(row).items():
            self._writer.add_text(name, text, row.get("step"))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _texts(row: Row) -> dict[str, str]:
    """As Markdown, which TensorBoard shows: a sample is indented so that its line breaks and stars are left alone."""
    texts = {}
    if "sample" in row:
        sample = str(row["sample"]).encode("utf-8", "replace").decode("utf-8")
        texts["samples"] = textwrap.indent(sample, "    ", lambda line: True)
    if "event" in row:
        texts["events"] = f"**{row['event']}** {row.get('message', '')}"
    return texts
