"""Evaluation of demand forecasts: demand files, baselines, scores and rolling backtests."""
