"""Statistics over blocks: estimates, intervals, tests, margins, and how many blocks are enough.

Everything here works on plain numbers; nothing knows of profiles or directories.
"""
