"""Demand counted at gateways, folded into time bins, and turned into histories for forecasts."""
