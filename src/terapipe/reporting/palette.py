"""The colours, in one place. Written as ``#rrggbb``: every viewer and renderer knows that form."""

from colorsys import hls_to_rgb

from terapipe.scheduling.actions import Op

OPS = {Op.F: (212, 0.66), Op.B: (27, 0.66), Op.I: (345, 0.52), Op.W: (160, 0.42)}  # hue and saturation
DARKEST, LIGHTEST, MIDDLE = 0.44, 0.72, 0.54  # of the first slice of a microbatch, its last, and its only one
CAUSES = {"fill": "#7c9cc9", "drain": "#a58bc9", "imbalance": "#d9a441", "transfer": "#4aa899"}
OTHER_CAUSE = "#98a2ad"
# Hue and lightness; not those of the ops, with which a line has nothing to do.
_SERIES = ((262, 0.62), (176, 0.42), (40, 0.48), (325, 0.56), (205, 0.52), (95, 0.42))

# Tone: the colour by itself, for a picture that stands alone. Inside a page the style sheet has the last word.
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
    return "#" + "".join(f"{round(255 * c):02x}" for c in hls_to_rgb(hue / 360, lightness, saturation))


def of_op(op: Op, light: float = MIDDLE) -> str:
    return hsl(*OPS[op], light)


def lightness(number: int, count: int) -> float:
    """Of slice ``number`` among ``count``."""
    return DARKEST + (LIGHTEST - DARKEST) * number / (count - 1) if count > 1 else MIDDLE


def on(light: float) -> str:
    """The colour of text upon a bar of this lightness."""
    return "#ffffff" if light < 0.6 else "#14202c"


def series(index: int) -> str:
    """The colour of the ``index``-th line of a chart."""
    hue, light = _SERIES[index % len(_SERIES)]
    return hsl(hue, 0.56, light)
