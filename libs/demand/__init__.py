"""Demand counted at gateways, summed in time bins, and converted to histories for forecasts."""
