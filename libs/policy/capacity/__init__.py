"""Capacity planning from demand: the work of each phase, the workers that it needs, and when they run short."""
