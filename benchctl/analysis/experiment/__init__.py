"""An experiment in memory, its runs side by side, and its tables.

``experiment`` derives everything about single runs, once; ``pairing`` matches arms for comparison and has their one
ratio of each metric; ``ladder`` divides the cost of controls, and decides after a block whether the experiment is
precise enough to end; ``summary`` has the rows of runs and arms, of ``columns``; ``drafts`` what speculation did.
"""
