"""Actuators, which start and end workers when the planner requests another number of them."""
