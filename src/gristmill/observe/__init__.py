"""What a run shows of itself: events, progress lines, metrics and the final report."""
