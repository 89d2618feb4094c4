"""The simulator's HTTP shell: routes, request bodies, replies, counters and wall time."""
