"""Phase shares of servers that export counters only, estimated from those counters. Pure."""
