"""Many models on few GPUs, on whole suites."""
