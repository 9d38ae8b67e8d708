"""The numbers of a run to Weights & Biases and trackio."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from terapipe import files
from terapipe.config import LoggingConfig
from terapipe.training.logging.rows import Row, flat


def chosen(config: LoggingConfig) -> list[str]:
    return [name for name in ("wandb", "trackio") if getattr(config, name)]


class Tracker:
    """wandb or trackio, which are called alike. Neither can forget: going back to an earlier step begins another run
    of the same group, and only one that goes on where it ended is continued."""

    def __init__(self, name: str, project: str, folder: Path, anew: bool, settings: Mapping[str, Any]) -> None:
        self.name = name
        file = folder / f"{name}-run"
        if anew or not file.exists():
            files.write(file, uuid4().hex[:8])
        run, group = file.read_text(encoding="utf-8"), folder.resolve().name
        own = {"id": run, "dir": str(folder)} if name == "wandb" else {}
        self._run: Any = import_module(name).init(
            project=project, name=f"{group}-{run}", group=group, config=dict(settings), resume="allow", **own
        )

    def write(self, row: Row) -> None:
        numbers = flat(row)
        if numbers:
            self._guarded(lambda: self._run.log(numbers, step=row.get("step")))

    def close(self) -> None:
        self._guarded(self._run.finish)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # whatever their networks and databases throw
            raise OSError(f"{type(error).__name__}: {error}") from error
