"""Names and colors of what is drawn. Colors are ``#rrggbb``, which every viewer and renderer reads."""

from colorsys import hls_to_rgb

from terapipe.planning.slices import Slice
from terapipe.reporting.units import count
from terapipe.scheduling.actions import Action, Op

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
    return "#" + "".join(f"{round(255 * c):02x}" for c in hls_to_rgb(hue / 360, lightness, saturation))


def op_color(op: Op, light: float = MIDDLE) -> str:
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
