"""Drawing: a Timeline as text, SVG, PNG, an interactive HTML page or a Perfetto trace. No torch here."""

from terapipe.reporting.charts import lines
from terapipe.reporting.page import report
from terapipe.reporting.style import table
from terapipe.reporting.svg import timelines
from terapipe.reporting.text import draw
from terapipe.reporting.view import RunView

__all__ = ["RunView", "draw", "lines", "report", "table", "timelines"]
