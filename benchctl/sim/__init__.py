"""An inference-server simulator: a virtual-time core behind a thin HTTP shell.

``python -m benchctl.sim`` starts it as a server like any other. It emulates continuous batching with paged
key-value memory and the guided decoding of the LenVM fork; its numbers are those of a cost model, not of hardware.

Start with ``engine.py`` (one step), ``scheduler.py`` and ``block_manager.py`` (the rows of a batch),
``guidance.py`` (the work of a value model), ``costs/`` (the time of a step), ``core.py`` and ``simulate.py`` (a
whole request list in virtual time), ``http/server.py`` (the HTTP shell).
"""
