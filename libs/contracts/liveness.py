"""How often a worker is heard of at least, on each of its streams."""

SIGN_OF_LIFE_MS = 100
"""A worker that serves lets no more than this pass between two frames to a gateway that it has work of, whether or not
there is news. The first submit to one that rested is answered by a frame within it too."""
RESTING_SIGN_OF_LIFE_MS = 500
"""Likewise to a gateway that it has no work of: nothing depends on it then."""

FRESH_NS = 2_000_000_000
"""Workers report at least three times a second: an older report is not what it has now."""
