"""What a run writes and shows: metrics, the display on a terminal, the report."""
