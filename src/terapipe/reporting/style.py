"""How things look: numbers with units, names and colors of actions, HTML elements and the page around them.

One place for both, because a color or a unit that differs between two sections of a page makes a reader look for a
meaning. ``timeline.js`` gets its colors from here as data, ``page.css`` has the tones of both color schemes.
"""

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
    """Writes a time with three digits and a unit: ``0.0123`` is "12.3 ms".

    Args:
        value: Seconds.
    """
    return _with_unit(value, _TIMES)


def memory(value: float) -> str:
    """Writes a size with three digits and a binary unit: ``3 * 2**29`` is "1.5 GiB".

    Args:
        value: Bytes.
    """
    return _with_unit(value, _SIZES)


def share(value: float) -> str:
    """Writes a share as percent: ``0.0834`` is "8.3%", ``0.25`` is "25%". Small shares keep one decimal, because idle
    time is often small.

    Args:
        value: Between 0 and 1.
    """
    return f"{value:.1%}" if abs(value) < 0.0995 and value else f"{value:.0%}"


def memory_unit(value: float) -> float:
    """The unit, in bytes, that ``memory`` uses for a number: 2**30 for all GiB. An axis up to this number counts in it.

    Args:
        value: Bytes.
    """
    return next((size for size, _ in _SIZES if abs(value) >= size), 1.0)


def digits(value: float) -> str:
    """Writes a number with three significant digits, never an exponent: 1234.5 is "1234", 0.01234 is "0.0123".

    Args:
        value: Any number. Infinity and NaN are written as such.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(number: int, noun: str) -> str:
    """Writes a number with its noun: ``count(2, "slice")`` is "2 slices".

    Args:
        number: How many.
        noun: In the singular; its plural must end in s.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _with_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Writes a number in the largest unit that leaves at least one before the point."""
    if value == 0:
        return "0"
    # 999.9 ms rounds to 1000 ms, so it is written as 1 s.
    size, name = next(((s, n) for s, n in units if abs(value) >= 0.9995 * s), units[-1])
    return f"{digits(value / size)} {name}"


# Names and colors. Colors are ``#rrggbb``, which every viewer and renderer reads.

OP_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward, inputs",
    Op.W: "backward, weights",
    Op.OUT: "copy to host",
    Op.BACK: "copy back",
    Op.KV_OUT: "keys and values to host",
    Op.KV_BACK: "keys and values back",
}
TRANSFER_NAMES = {
    Op.SEND_F: "send output",
    Op.RECV_F: "receive input",
    Op.SEND_B: "send gradient",
    Op.RECV_B: "receive gradient",
}

OP_HUES = {  # hue and saturation
    Op.F: (212, 0.66),
    Op.B: (27, 0.66),
    Op.I: (345, 0.52),
    Op.W: (160, 0.42),
    Op.OUT: (275, 0.45),
    Op.BACK: (190, 0.60),
    Op.KV_OUT: (300, 0.50),
    Op.KV_BACK: (170, 0.65),
}
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
    """A color as ``#rrggbb``. Renderers of SVG do not all know CSS's ``hsl()``.

    Args:
        hue: Degrees on the color circle.
        saturation: 0 is gray, 1 pure.
        lightness: 0 is black, 1 white.
    """
    return "#" + "".join(f"{round(255 * c):02x}" for c in hls_to_rgb(hue / 360, lightness, saturation))


def op_color(op: Op, light: float = MIDDLE) -> str:
    """The color of a kind of computation: forwards blue, backwards orange, their two halves red and green.

    Args:
        op: A computation, not a transfer.
        light: Lightness, as ``lightness`` gives it for a slice.
    """
    return hsl(*OP_HUES[op], light)


def lightness(number: int, count: int) -> float:
    """The lightness of a slice: the first of a microbatch is darkest, the last lightest.

    Args:
        number: Of the slice in its microbatch.
        count: How many slices the microbatch has. A single one is between.
    """
    return DARKEST + (LIGHTEST - DARKEST) * number / (count - 1) if count > 1 else MIDDLE


def text_color(light: float) -> str:
    """The color of text on a bar: white or nearly black, whichever can be read.

    Args:
        light: The bar's lightness.
    """
    return "#ffffff" if light < 0.6 else "#14202c"


def line_color(index: int) -> str:
    """The color of a line of a chart. After six they begin again.

    Args:
        index: Of the line, from 0.
    """
    hue, light = _LINES[index % len(_LINES)]
    return hsl(hue, 0.56, light)


def in_words(action: Action) -> str:
    """Describes an action: "forward: stage 1, microbatch 0, slice 3 (256 tokens after 512)".

    Args:
        action: A computation or a transfer.
    """
    name = OP_NAMES.get(action.op) or TRANSFER_NAMES[action.op]
    s = action.slice
    return f"{name}: stage {action.stage}, microbatch {s.microbatch}, slice {s.number} ({_tokens(s)})"


def _tokens(s: Slice) -> str:
    return count(s.length, "token") + (f" after {s.context}" if s.context else "")


# HTML

# The browser loads nothing from elsewhere, so a page is safe to pass on.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def asset(name: str) -> str:
    """The text of a style sheet or script, which pages have inside, so that a page is one file.

    Args:
        name: Of a file beside this module.
    """
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, wrapped: bool = False) -> str:
    """An HTML table that scrolls sideways where it is too wide.

    Args:
        header: Of the columns.
        rows: Cells as text, which is escaped here.
        wrapped: Whether the last column may break into lines, so that a wide table fits the page.
    """
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = " class='wrapped'" if wrapped else ""
    return f"<div class='scroll'><table{kind}><tr>{head}</tr>{body}</table></div>"


def facts(values: Mapping[str, str]) -> str:
    """A box of names and values; empty without any.

    Args:
        values: By name, as text, which is escaped here.
    """
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f"<dl class='facts'>{rows}</dl>" if rows else ""


def legend(colors: Mapping[str, str], *, with_idle: bool = False) -> str:
    """A row of names, each behind a square of its color.

    Args:
        colors: By name.
        with_idle: Whether the hatched square of idle time is the last.
    """
    keys = "".join(f"<span><i style='background:{color}'></i>{escape(name)}</span>" for name, color in colors.items())
    idle = "<span><i class='idle'></i>idle</span>" if with_idle else ""
    return f"<p class='legend'>{keys}{idle}</p>"


def page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """A whole HTML page with style sheet, without anything that a browser would have to load.

    Args:
        title: Its heading, and the title of the window.
        lead: The sentence below the heading.
        sections: Pairs of a heading, which may be empty, and ready HTML or SVG, which is not escaped here.
    """
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
