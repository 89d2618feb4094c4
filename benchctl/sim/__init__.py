"""An inference-server simulator: a virtual-time core behind a thin HTTP shell.

``python -m benchctl.sim`` starts it as a server like any other. It emulates continuous batching with paged
key-value memory and the guided decoding of the LenVM fork; its numbers are those of a cost model, not of hardware.

Start with ``engine.py`` (a step, or a leap over many), ``scheduler.py`` and ``block_manager.py`` (the rows of a
batch), ``steps/`` (stretches of decode steps, and their columns), ``guidance.py`` and ``guided/`` (the work of a
value model), ``costs/`` (the time of a step), ``simulate.py`` and ``load.py`` (a whole load in virtual time),
``core.py`` and ``http/`` (the server, one step at a time).
"""
