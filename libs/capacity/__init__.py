"""Capacity plans, made from sampled demand and from tables that the lab measures, and checked by the lab."""
