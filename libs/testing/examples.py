"""How many examples a property tries."""

from hypothesis import settings

HYPOTHESIS_DEFAULT = 100
LEAST = 5


def examples(full: int) -> int:
    """For `max_examples`: `full`, less in proportion where the profile tries fewer than Hypothesis would by itself."""
    profile = settings.get_profile(settings.get_current_profile_name())
    return max(full * profile.max_examples // HYPOTHESIS_DEFAULT, min(full, LEAST))
