"""The way of a choice from the queue to workers: driven by the event loop live, by virtual time in the lab."""
