"""Scheduling of choices from the queue to workers, driven by the event loop live and by virtual time in the lab."""
