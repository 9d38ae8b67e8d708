"""Published tables: data files with their source, simulated cell by cell, and how far off we are.

A file in ``tables/`` is one table. Its rows and columns say what was run, each with a part of the configuration; a
cell's is all of them together, where the later wins:

    [setup]  <  setup of its row  <  its column        a cell of the row ``32k tokens`` and the column ``Seq1F1B``

A published number may be ``"OOM"``: that run did not fit. A row or a column may have a ``reason``: why we cannot
simulate it. Both stay in the report, so that nobody has to guess what was left out.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

from terapipe.published.simulation import MEASURES, Measure, Setup, Simulation

OOM: Literal["OOM"] = "OOM"
_TEXTS = ("title", "source", "hardware", "unit", "address", "note")  # keys of a file; the last two may be left out


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: Its heading.
        setup: What its cells have in common.
        ratio: Instead of a simulation: the columns whose quotient it is.
        counts: Whether its cells count in the table's mean and worst. Quotients do not: their parts do.
        reason: Why it is not simulated, or nothing.
    """

    name: str
    setup: Mapping[str, Any]
    ratio: tuple[str, str] | None = None
    counts: bool = True
    reason: str = ""

    @classmethod
    def of(cls, name: str, data: Mapping[str, Any]) -> Self:
        """Reads an entry of ``[columns]``.

        Args:
            name: Its key.
            data: Its value: keys of a `Setup`, and ``ratio``, ``counts`` or ``reason``.
        """
        ratio = tuple(data["ratio"]) if "ratio" in data else None
        setup = {key: value for key, value in data.items() if key not in ("ratio", "counts", "reason")}
        return cls(name, setup, ratio, data.get("counts", ratio is None), data.get("reason", ""))


@dataclass(frozen=True)
class Cell:
    """A published number beside ours.

    Attributes:
        row: The name of its row.
        column: Its column.
        published: The number, or ``"OOM"``.
        ours: What we simulate, or None if we cannot.
        note: Why we cannot, or what our memory model says against it.
        points: Whether the error is a difference, not relative.
    """

    row: str
    column: Column
    published: float | Literal["OOM"]
    ours: float | None = None
    note: str = ""
    points: bool = False

    @property
    def error(self) -> float | None:
        """Ours against the published: relative, or for rates the difference. None without a pair."""
        if self.ours is None or isinstance(self.published, str):
            return None
        return self.ours - self.published if self.points else self.ours / self.published - 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = {"row": self.row, "column": self.column.name, "published": self.published, "simulated": self.ours}
        return {**parts, "error": self.error, "note": self.note}


@dataclass(frozen=True)
class Score:
    """How far off a number of cells are.

    Attributes:
        cells: With a published number and one of ours.
        mean: Mean of their absolute errors.
        worst: The error that is farthest from zero, with its sign.
        where: The row and column of that one.
    """

    cells: int
    mean: float
    worst: float
    where: str

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> Self | None:
        """Summarizes the errors of these cells; None if none of them has one."""
        pairs = [(cell.error, cell) for cell in cells if cell.error is not None]
        if not pairs:
            return None
        worst, cell = max(pairs, key=lambda pair: abs(pair[0]))
        return cls(len(pairs), fmean(abs(error) for error, _ in pairs), worst, f"{cell.row}: {cell.column.name}")


@dataclass(frozen=True)
class Table:
    """A published table, as its file has it.

    Attributes:
        name: Of the file.
        title: What was measured.
        source: Where it was published.
        address: Where to find it, if it is known.
        hardware: On what it was measured.
        unit: Of its numbers: a key of ``MEASURES``.
        note: What a reader must know to judge the comparison.
        setup: What all cells have in common.
        columns: By name.
        rows: Name, configuration, published numbers by column, and the reason not to simulate it, or nothing.
    """

    name: str
    title: str
    source: str
    address: str
    hardware: str
    unit: str
    note: str
    setup: Mapping[str, Any]
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]

    @classmethod
    def load(cls, name: str) -> Self:
        """Reads a table of this package, or a file of your own measurements in the same form.

        Args:
            name: Such as ``megatron_sc21`` (see `names`), or the path of a file that ends in ``.toml``.
        """
        if name.endswith(".toml"):
            return cls.of(Path(name).stem, tomllib.loads(Path(name).read_text(encoding="utf-8")))
        if name not in names():
            raise ValueError(f"unknown table {name!r}; the tables are {', '.join(names())}; or name a .toml file")
        return cls.of(name, tomllib.loads(_folder().joinpath(f"{name}.toml").read_text(encoding="utf-8")))

    @classmethod
    def of(cls, name: str, data: Mapping[str, Any]) -> Self:
        """Checks what a file says, so that a slip in it is named before anything is simulated.

        Args:
            name: For reports.
            data: The file's content.
        """
        if missing := [key for key in (*_TEXTS[:4], "setup", "columns", "rows") if key not in data]:
            raise ValueError(f"table {name} lacks {', '.join(missing)}")
        if data["unit"] not in MEASURES:
            raise ValueError(f"table {name} has the unit {data['unit']!r}; the units are {', '.join(MEASURES)}")
        columns = {key: Column.of(key, value) for key, value in data["columns"].items()}
        for row in data["rows"]:
            if "name" not in row or not row.get("published") or set(row["published"]) - set(columns):
                raise ValueError(f"table {name}: a row has a name and published numbers of {list(columns)}, got {row}")
            for key in row["published"]:
                Setup.of({**data["setup"], **row.get("setup", {}), **columns[key].setup})
        texts = {key: data.get(key, "") for key in _TEXTS}
        return cls(name, **texts, setup=data["setup"], columns=tuple(columns.values()), rows=tuple(data["rows"]))

    @property
    def measure(self) -> Measure:
        """What its numbers are."""
        return MEASURES[self.unit]

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, simulated, row by row. Takes milliseconds to seconds."""
        return tuple(cell for row in self.rows for cell in self._row(row))

    def _row(self, row: Mapping[str, Any]) -> Iterable[Cell]:
        """Simulated cells first, then the quotients of those."""
        cells: dict[str, Cell] = {}
        for column in self.columns:
            if column.ratio is not None:
                top, bottom = (cells.get(name) for name in column.ratio)
                if top and bottom and (cell := _quotient(column, top, bottom)):
                    cells[column.name] = cell
            elif column.name in row["published"]:
                cells[column.name] = self._cell(row, column)
        return cells.values()

    def _cell(self, row: Mapping[str, Any], column: Column) -> Cell:
        published, points = row["published"][column.name], self.measure.points
        reason = row.get("reason", "") or column.reason
        if reason:
            return Cell(row["name"], column, published, note=f"not simulated: {reason}", points=points)
        simulation = Simulation(Setup.of({**self.setup, **row.get("setup", {}), **column.setup}))
        fits = simulation.fits if self.measure.timed else None
        ours = None if published == OOM else self.measure.of(simulation)
        return Cell(row["name"], column, published, ours, _memory_note(published, simulation, fits), points)

    def score(self, column: str | None = None) -> Score | None:
        """Mean and worst, of the columns that count or of one column.

        Args:
            column: Its name.
        """
        chosen = (c for c in self.cells if (c.column.counts if column is None else c.column.name == column))
        return Score.of(chosen)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: mean and worst of the table and of each column, and every cell."""
        scores = {column.name: self.score(column.name) for column in self.columns}
        total = self.score()
        return {
            "title": self.title,
            "source": self.source,
            "address": self.address,
            "unit": self.unit,
            "error": "difference" if self.measure.points else "relative",
            **(vars(total) if total else {}),
            "not_simulated": sum(cell.ours is None and cell.published != OOM for cell in self.cells),
            "out_of_memory": sum(cell.published == OOM for cell in self.cells),
            "columns": {name: vars(score) for name, score in scores.items() if score},
            "rows": [cell.to_dict() for cell in self.cells],
        }


def _quotient(column: Column, top: Cell, bottom: Cell) -> Cell | None:
    """The quotient of two cells, published and ours. None where one of them is missing."""
    if isinstance(top.published, str) or isinstance(bottom.published, str) or not (top.ours and bottom.ours):
        return None
    return Cell(top.row, column, top.published / bottom.published, top.ours / bottom.ours)


def _memory_note(published: float | str, simulation: Simulation, fits: bool | None) -> str:
    """What our memory model says where it matters: a run that was out of memory, or one that we would refuse."""
    if fits is None or (fits and published != OOM):
        return ""
    gib = f"{simulation.peak_bytes / 2**30:.0f} GiB"
    if published == OOM:
        return f"ours fits, wrongly: {gib}" if fits else f"ours does not fit either: {gib}"
    return f"ours would not fit: {gib}"


def _folder() -> Any:
    return files(__package__).joinpath("tables")


def names() -> list[str]:
    """The names of all published tables, those of the TeraPipe paper first."""
    every = sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))
    return sorted(every, key=lambda name: not name.startswith("terapipe"))
