"""Entries of data with several fields: pairs of texts for preferences, and texts with a weight."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from terapipe.training.config import DataConfig, ObjectiveConfig
from terapipe.training.data.text_reader import read_entries
from terapipe.training.data.token_file import Progress, TokenWriter

EVERY = 256  # entries between reports of progress


@dataclass(frozen=True)
class Entries:
    """Which fields an entry has; none if documents are read as they are."""

    names: tuple[str, ...] = ()
    is_weighted: bool = False

    def texts(self, paths: list[Path]) -> Iterator[str]:
        """For training a tokenizer."""
        for _, values in read_entries(paths, self.names):
            yield from (value for value in values if isinstance(value, str))

    def add_all(self, writer: TokenWriter, paths: list[Path], progress: Progress) -> None:
        count = 0
        for count, (where, values) in enumerate(read_entries(paths, self.names), 1):
            if self.is_weighted:
                self._add_weighted(writer, values, where)
            else:
                self._add_pair(writer, values, where)
            if count % EVERY == 0:
                progress(writer.size)
        if not count:
            raise ValueError(f"there must be at least one entry with {', '.join(self.names)}, got none in {paths[0]}")
        progress(writer.size)

    def _add_weighted(self, writer: TokenWriter, values: tuple[Any, ...], where: str) -> None:
        text, weight = values
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not weight >= 0:
            raise ValueError(f"{where}: {self.names[1]!r} must be a number of at least 0, got {weight!r:.50}")
        (ids,) = writer.encode(_text(text, self.names[0], where))
        writer.add(ids, float(weight))

    def _add_pair(self, writer: TokenWriter, values: tuple[Any, ...], where: str) -> None:
        """The chosen text, then the rejected one, each with the tokens of its prompt."""
        chosen, rejected, *prompt = (_text(v, name, where) for v, name in zip(values, self.names, strict=True))
        both = writer.encode(chosen, rejected)
        if prompt:
            (before,) = writer.encode(prompt[0])
            both, length = [before + ids for ids in both], len(before)
        else:
            length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False)))
        for ids in both:
            if length >= len(ids) + 1 or not ids:
                raise ValueError(f"{where}: a text must have tokens after the prompt, got none")
            writer.add(ids, length)


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {field!r} must hold text, got {value!r:.50}")
    return value


def entries_of(data: DataConfig, objective: ObjectiveConfig) -> Entries:
    if objective.kind == "dpo":
        names = (objective.chosen, objective.rejected)
        return Entries((*names, objective.prompt) if objective.prompt else names)
    return Entries((data.field, objective.weights), is_weighted=True) if objective.weights else Entries()
