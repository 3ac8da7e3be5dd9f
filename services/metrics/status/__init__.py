"""The verdict: pressure on each model's workers, what holds requests up, and what to do about it."""
