"""Servers that tests start, as engines and as processes; ``programs`` has the code of these processes."""
