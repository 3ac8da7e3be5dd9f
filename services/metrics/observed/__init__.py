"""Servers that are not ours, observed from their own /metrics."""
