"""Tuning: throughput measured over batch budgets, workers and threads, and backends, on real rows of a job's source."""
