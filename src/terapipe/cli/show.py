"""The console that all verbs print to."""

from rich.console import Console

from terapipe.reporting.plans import WIDTH

console = Console(highlight=False, soft_wrap=True)
if not console.is_terminal:
    console.width = WIDTH
