"""Blocks on the slots of this host: each in a process of its own, with devices and cores that no other one has."""
