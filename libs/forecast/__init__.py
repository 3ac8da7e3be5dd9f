"""Forecasts of demand held against what came: files, baselines, scores, rolling backtests."""
