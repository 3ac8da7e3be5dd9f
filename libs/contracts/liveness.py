"""The least rate at which a worker sends on each of its streams."""

# Longest pause between two frames to a gateway that a worker has work of, with news or without. A frame within it
# also answers the first submit to an idle worker.
SIGN_OF_LIFE_MS = 100
# The same to a gateway without work here, for which nothing depends on it.
RESTING_SIGN_OF_LIFE_MS = 500

# Workers report at least three times a second; an older report does not describe the present.
FRESH_NS = 2_000_000_000
