"""Phase shares of servers that export only counters, estimated from those counters."""
