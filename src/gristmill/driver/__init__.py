"""The driver: from a job to a plan, what runs next, gates, publishing, the report."""
