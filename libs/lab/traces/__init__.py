"""Traces: read from public logs and our own recordings, generated, cut, scaled and described."""
