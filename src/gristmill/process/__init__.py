"""Processes and machines: how interpreters are started, watched, interrupted and ended, and what they report."""
