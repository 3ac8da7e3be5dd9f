"""Many models on few GPUs: logs of their use, and the value of reservations and of rules for keeping models loaded."""
