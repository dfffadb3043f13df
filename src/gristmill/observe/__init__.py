"""How a run shows itself: events, progress lines, metrics and the final report."""
