"""The commit protocol: how a shard becomes part of a result exactly once, and how a result is published."""
