"""The parts of a simulated worker: device, KV transfers, credits and roles, and reports."""
