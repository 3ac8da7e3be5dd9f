"""Demand forecasts with calibrated bands: arrivals and their prompt and output tokens, hours ahead."""
