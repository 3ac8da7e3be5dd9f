"""Load and benchmarks: run by hand or by `make bench-...`, never imported by the product."""
