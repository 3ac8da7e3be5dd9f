"""Many models on few GPUs: logs of their use, and what a reservation would have been worth."""
