"""How many workers there should be, and the actuator that is asked for them."""
