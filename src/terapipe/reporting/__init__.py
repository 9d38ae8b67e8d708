"""Drawing: a Timeline as text, SVG, PNG, an interactive HTML page or a Perfetto trace. No torch here.

    style    numbers with units, colors, HTML elements and the page around them
    svg      SVG elements, timelines as bars, PNG          charts   lines, curves, bars, time against memory
    view     a run as pages and traces show it             page     the interactive page of runs (timeline.js, page.css)
    text     a timeline in a terminal                      trace    runs for Perfetto
    plans    plans and comparisons in words and tables

A predicted and a measured step are the same type, ``Timeline``, so nothing here asks where one comes from.
``Timeline.draw``, ``to_svg``, ``to_html`` and the command line call these functions.
"""

from terapipe.reporting.charts import lines
from terapipe.reporting.page import report
from terapipe.reporting.style import table
from terapipe.reporting.svg import timelines
from terapipe.reporting.text import draw
from terapipe.reporting.view import RunView

__all__ = ["RunView", "draw", "lines", "report", "table", "timelines"]
