"""An experiment in memory, and its runs side by side: arms, blocks, pairs of arms, ladders of controls.

``experiment`` derives everything about single runs, once; ``pairing`` and ``paired_runs`` match arms for
comparison; ``stopping`` decides after a block whether the experiment is precise enough to end.
"""
