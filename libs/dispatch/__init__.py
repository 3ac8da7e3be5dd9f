"""Scheduling of choices from the queue to workers.

The gateway drives it by the event loop, the lab by simulated time.
"""
