"""An experiment in memory, and its runs side by side: arms, cells, blocks, pairs, ladders of controls.

``experiment`` derives everything about one run once; ``pairing`` and ``paired_runs`` say which runs are compared.
"""
