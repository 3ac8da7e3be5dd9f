"""Demand forecasts with honest bands: what arrives, and its prompt and output tokens, hours ahead. Pure."""
