"""An inference-server simulator: a virtual-time core behind a thin HTTP shell.

It is a server like any other: ``python -m benchctl.sim`` starts it, HTTP speaks to it, and its step log says what
it did. What it emulates is a continuous-batching engine with paged key-value memory, and on top of that the
guided decoding of the LenVM fork. Its numbers are those of a cost model, not of hardware.

Reading guide: ``engine.py`` (one step), ``scheduler.py`` and ``block_manager.py`` (which rows it holds),
``guidance.py`` (what a value model adds), ``cost_*.py`` (what it costs), ``core.py`` and ``simulate.py`` (a whole
request list in virtual time), ``server.py`` (the HTTP shell).
"""
