"""Capacity plans: demand's sample paths over tables made by the lab, and the lab's check of the result."""
