"""Evaluation of demand forecasts: files, baselines, scores and rolling backtests."""
