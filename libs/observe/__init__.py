"""Phase shares of servers outside Fulcrum, computed from the metrics that they export."""
