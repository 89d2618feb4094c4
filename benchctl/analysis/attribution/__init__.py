"""Attribution of time: sections of a step, factors of the wall time, FLOPs, and the differences of two sides.

Parts add up to their whole exactly, and each has its own interval.
"""
