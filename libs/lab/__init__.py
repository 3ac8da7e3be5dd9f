"""The lab: traces replayed through the live system's decisions on a cluster in virtual time (see docs/lab.md)."""
