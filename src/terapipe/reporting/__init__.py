"""Drawing: a Timeline as text, SVG, PNG, an interactive HTML page or a Perfetto trace. No torch here."""
