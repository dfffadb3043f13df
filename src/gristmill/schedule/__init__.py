"""Jobs that run by themselves: when, one queue, what happened; and the same told to the schedulers of others."""
