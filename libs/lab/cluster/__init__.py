"""A cluster in virtual time: the live engine core, dispatcher and policies, driven by events."""
