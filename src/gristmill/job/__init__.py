"""What a job declares: source, steps, model, sink, gates, options. Frozen values; nothing here reads data."""
