"""What a worker of the lab is made of: device, KV, duties, and what it says."""
