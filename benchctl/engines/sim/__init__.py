"""The simulator as an engine: ``benchctl.sim`` in a process of its own. Its counters have vLLM's names."""
