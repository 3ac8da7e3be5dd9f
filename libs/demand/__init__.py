"""Demand as it arrives: counted at gateways, folded into time bins, made a history that forecasts are fitted on."""
