"""Micro-benchmarks of one forward pass: launch cost against compute, bonus tokens, and the peaks of a device.

``inside`` is what runs in an interpreter that has torch, and everything else
starts it and turns its times into an ordinary result directory.
"""
