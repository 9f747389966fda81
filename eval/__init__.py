"""Metrics, intervals, benchmarks and the report."""
