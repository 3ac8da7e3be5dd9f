"""Workers of a suite that run only while the planner requests them."""
