"""Request set and arrival schedule: prompts, limits and times; seeded, the same bytes on every machine.

``prepare.py`` makes them from a profile, ``datasets/`` has the sources of prompts.
"""
