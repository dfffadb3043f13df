"""Which rows go to a model together: windows and budgets of a job, and dynamic batching of concurrent calls."""
