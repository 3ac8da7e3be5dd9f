"""Observation of other vendors' servers through their own /metrics."""
