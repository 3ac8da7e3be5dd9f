"""What starts and ends workers when a planner wishes another number of them."""
