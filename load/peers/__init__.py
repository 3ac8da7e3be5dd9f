"""Other serving systems, run beside Fulcrum on the same machine with the same load."""
