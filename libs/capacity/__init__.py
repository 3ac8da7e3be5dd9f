"""Capacity plans: demand's sample paths over tables that the lab makes, and the lab's check of what comes of them."""
