"""An inference-server simulator: a virtual-time core behind a thin HTTP shell.

``python -m benchctl.sim`` starts it as a server like any other. It emulates continuous batching with paged
key-value memory and the guided decoding of the LenVM fork; its numbers are those of a cost model, not of hardware.

Start with ``engine.py`` (a step, or a leap over many), ``scheduling/`` (the rows of a batch and their blocks),
``steps/`` (stretches of decode steps, and their columns), ``guided/`` (the work of a value model), ``costs/`` (the
time of a step), ``simulate.py`` and ``requests/`` (a whole load in virtual time), ``core.py`` and ``http/`` (the
server, one step at a time), ``prediction/`` (a plan before it is measured).
"""
