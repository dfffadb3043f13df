"""Engines: where items run. Each moves items to workers that keep their state, and reports; none makes decisions."""
