"""Dynamic batching of calls: concurrent calls of a function grouped."""
