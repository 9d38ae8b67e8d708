"""What every picture is made of: text, lines, boxes, ticks. Plain SVG.

Each element has its colour as an attribute, for a picture that stands alone, and its tone as a class, by which the
style sheet of a page may give it another: that is how pictures follow the dark colour scheme.
"""

import math
from collections.abc import Sequence
from html import escape

from terapipe.reporting.palette import TONES

_FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif'"
_GLYPH = 0.56  # the mean width of a character, in font sizes: enough to keep labels apart


def document(width: float, height: float, parts: Sequence[str], label: str = "") -> str:
    idle = (
        "<defs><pattern id='idle' width='6' height='6' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
        f"<rect width='6' height='6' class='idle' fill='{TONES['idle']}'/>"
        f"<line x1='0' y1='0' x2='0' y2='6' class='hatch' stroke='{TONES['hatch']}' stroke-width='2'/>"
        "</pattern></defs>"
    )
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' "
        f"height='{height:.0f}' role='img' aria-label='{escape(label)}' {_FONT}>"
    )
    return "\n".join([head, idle, box(0, 0, width, height, tone="paper"), *parts, "</svg>"])


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    tone: str = "ink",
    fill: str = "",
    size: int = 13,
    weight: int = 400,
    halo: bool = False,
) -> str:
    """``fill``, where given, is a colour of its own, the same on every page. A halo keeps lines off the letters."""
    colour = f"fill='{fill}'" if fill else f"class='{tone}{' edge' * halo}' fill='{TONES[tone]}'"
    colour += f" stroke='{TONES['paper']}' stroke-width='3' paint-order='stroke'" if halo else ""
    style = f"font-size='{size}' text-anchor='{anchor}' font-weight='{weight}' {colour}"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, *, tone: str = "", fill: str = "", round_: float = 0) -> str:
    colour = f"fill='{fill}'" if fill else f"class='{tone}' fill='{TONES[tone]}'"
    corner = f" rx='{round_:g}'" if round_ else ""
    return f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}'{corner} {colour}/>"


def line(x1: float, y1: float, x2: float, y2: float, *, tone: str = "line", dash: str = "") -> str:
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    place = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {place} class='{tone}' stroke='{TONES[tone]}'{dashes}/>"


def path(points: Sequence[tuple[float, float]], colour: str, *, width: float = 2, extra: str = "") -> str:
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f"<polyline points='{drawn}' fill='none' stroke='{colour}' stroke-width='{width:g}' stroke-linejoin='round'"
        f"{' ' + extra if extra else ''}/>"
    )


def text_width(words: str, size: float) -> float:
    return _GLYPH * size * len(words)


def round_step(rough: float) -> float:
    """The largest of 1, 2, 5 times a power of ten that is not above ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return max(m for m in (1, 2, 5) if m * power <= rough * (1 + 1e-9)) * power


def ticks(low: float, high: float, about: int, unit: float = 1.0) -> list[float]:
    """Round multiples of ``unit`` from ``low`` to ``high``, at least ``about`` of them."""
    step = round_step((high - low) / unit / about) * unit
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]
