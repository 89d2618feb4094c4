"""Statistics over blocks: estimates, intervals, tests, margins, verdicts, and the number of blocks that they take.

Everything here works on plain numbers and knows neither profiles nor directories.
"""
