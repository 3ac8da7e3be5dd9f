"""How often a worker is heard of at least, on each of its streams."""

SIGN_OF_LIFE_MS = 100
"""A worker that serves lets no more than this pass between two frames to a gateway, whether or not there is news."""
