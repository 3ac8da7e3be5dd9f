"""The verdict: how hard work presses on each model's workers, what holds requests up, and what to do."""
