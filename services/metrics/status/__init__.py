"""The verdict: the pressure on each model's workers, the cause of delays, and the remedy."""
