"""The decisions of the whole project: plain records in and out, standard library and numpy only.

No clock, no I/O, no logging, no randomness: the live services, the seeded simulation and the lab call the same
functions. A package is named after the process that uses it: `gateway`, `worker`, `planner`, `metrics`, `alerts`,
`batch`. `forecast` and `reserve` predict demand.
"""
