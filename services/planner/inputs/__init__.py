"""What the planner hears of workers, side by side."""
