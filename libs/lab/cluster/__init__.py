"""A cluster in virtual time: the engine core, dispatcher and policies that run live, driven by events."""
