"""How things look: numbers with units, names and colors of actions, HTML elements and the page around them."""

import math
from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from html import escape
from importlib.resources import files

from terapipe.planning.slices import Slice
from terapipe.scheduling.actions import Action, Op

# Numbers

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def seconds(value: float) -> str:
    """``0.0123`` is "12.3 ms"."""
    return _with_unit(value, _TIMES)


def memory(value: float) -> str:
    """``3 * 2**29`` is "1.5 GiB"."""
    return _with_unit(value, _SIZES)


def share(value: float) -> str:
    """``0.0834`` is "8.3%". Small shares keep one decimal, because idle time is often small."""
    return f"{value:.1%}" if abs(value) < 0.0995 and value else f"{value:.0%}"


def memory_unit(value: float) -> float:
    """The unit, in bytes, that ``memory`` uses for this number: the unit of an axis."""
    return next((size for size, _ in _SIZES if abs(value) >= size), 1.0)


def digits(value: float) -> str:
    """Three significant digits, never an exponent: 1234.5 is "1234", 0.01234 is "0.0123"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(number: int, noun: str) -> str:
    """``count(2, "slice")`` is "2 slices"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
    if value == 0:
        return "0"
    # 999.9 ms rounds to 1000 ms, so it is written as 1 s.
    size, name = next(((s, n) for s, n in units if abs(value) >= 0.9995 * s), units[-1])
    return f"{digits(value / size)} {name}"


# Names and colors. Colors are ``#rrggbb``, which every viewer and renderer reads.

OP_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "backward, inputs", Op.W: "backward, weights"}
TRANSFER_NAMES = {
    Op.SEND_F: "send output",
    Op.RECV_F: "receive input",
    Op.SEND_B: "send gradient",
    Op.RECV_B: "receive gradient",
}

OP_HUES = {Op.F: (212, 0.66), Op.B: (27, 0.66), Op.I: (345, 0.52), Op.W: (160, 0.42)}  # hue and saturation
DARKEST, LIGHTEST, MIDDLE = 0.44, 0.72, 0.54  # lightness of a microbatch's first, last and only slice
CAUSES = {"fill": "#7c9cc9", "drain": "#a58bc9", "imbalance": "#d9a441", "transfer": "#4aa899"}
OTHER_CAUSE = "#98a2ad"
# Hue and lightness of lines. They differ from the colors of ops, which mean something else.
_LINES = ((262, 0.62), (176, 0.42), (40, 0.48), (325, 0.56), (205, 0.52), (95, 0.42))

# Colors of a picture that stands alone. Inside a page, the style sheet overrides them by class name.
TONES = {
    "ink": "#1f2933",
    "faint": "#616e7c",
    "line": "#d9dfe5",
    "paper": "#ffffff",
    "idle": "#f1f4f7",
    "hatch": "#d3dae1",
    "pale": "#aab4be",
}


def hsl(hue: float, saturation: float, lightness: float) -> str:
    """A color by hue in degrees, saturation and lightness."""
    return "#" + "".join(f"{round(255 * c):02x}" for c in hls_to_rgb(hue / 360, lightness, saturation))


def op_color(op: Op, light: float = MIDDLE) -> str:
    """The color of a kind of computation."""
    return hsl(*OP_HUES[op], light)


def lightness(number: int, count: int) -> float:
    """The lightness of slice ``number`` of ``count`` slices."""
    return DARKEST + (LIGHTEST - DARKEST) * number / (count - 1) if count > 1 else MIDDLE


def text_color(light: float) -> str:
    """The color of text on a bar of this lightness."""
    return "#ffffff" if light < 0.6 else "#14202c"


def line_color(index: int) -> str:
    """The color of the ``index``-th line of a chart."""
    hue, light = _LINES[index % len(_LINES)]
    return hsl(hue, 0.56, light)


def in_words(action: Action) -> str:
    """For example "forward: stage 1, microbatch 0, slice 3 (256 tokens after 512)"."""
    name = OP_NAMES.get(action.op) or TRANSFER_NAMES[action.op]
    s = action.slice
    return f"{name}: stage {action.stage}, microbatch {s.microbatch}, slice {s.number} ({_tokens(s)})"


def _tokens(s: Slice) -> str:
    return count(s.length, "token") + (f" after {s.context}" if s.context else "")


# HTML

# The browser loads nothing from elsewhere, so a page is safe to pass on.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def asset(name: str) -> str:
    """A style sheet or script of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, wrapped: bool = False) -> str:
    """``wrapped`` breaks the last column into lines, so that a wide table fits the page."""
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = " class='wrapped'" if wrapped else ""
    return f"<div class='scroll'><table{kind}><tr>{head}</tr>{body}</table></div>"


def facts(values: Mapping[str, str]) -> str:
    """A box of names and values."""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f"<dl class='facts'>{rows}</dl>" if rows else ""


def page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """``sections`` are pairs of a heading, which may be empty, and ready HTML or SVG."""
    body = "\n".join(_section(heading, content) for heading, content in sections)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>\n"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta name='color-scheme' content='light dark'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>\n{asset('page.css')}</style></head>\n"
        f"<body><main><header><h1>{escape(title)}</h1>\n<p class='lead'>{escape(lead)}</p></header>\n"
        f"{body}\n</main></body></html>\n"
    )


def _section(heading: str, content: str) -> str:
    return f"<section>{f'<h2>{escape(heading)}</h2>' if heading else ''}\n{content}</section>"
