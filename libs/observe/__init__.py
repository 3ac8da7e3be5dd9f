"""Servers that are not ours, seen through what they export."""
