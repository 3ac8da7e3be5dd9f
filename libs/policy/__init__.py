"""Every decision, and nothing else: plain records in and out, standard library and numpy.

No clock, no I/O, no logging, no randomness of its own: the live services, the seeded simulation and the lab call the
same functions. A room is named for who decides by it: `gateway`, `worker`, `planner`, `metrics`, `alerts`,
`batch`; `forecast` and `reserve` say what will be wanted.
"""
