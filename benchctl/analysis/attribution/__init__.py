"""Where the time of a run goes: sections of a step, factors of the wall time, FLOPs, and what two sides differ in.

Parts add up to their whole exactly, and each carries its interval.
"""
