"""`fulcrum planner`."""
