"""The number of examples that a property tries."""

from hypothesis import settings

HYPOTHESIS_DEFAULT = 100
LEAST = 5


def examples(full: int) -> int:
    """Return `max_examples`: `full`, or proportionally less under a profile with fewer than Hypothesis's default."""
    profile = settings.get_profile(settings.get_current_profile_name())
    return max(full * profile.max_examples // HYPOTHESIS_DEFAULT, min(full, LEAST))
