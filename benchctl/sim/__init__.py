"""An inference-server simulator: a virtual-time core behind a thin HTTP shell.

``python -m benchctl.sim`` starts it as a server like any other. It emulates continuous batching with paged
key-value memory and the guided decoding of the LenVM fork; its numbers are those of a cost model, not of hardware.

Start with ``engine.py`` (a step, or a leap over many), ``scheduler.py`` and ``sequences.py`` (the rows of a batch
and their blocks), ``steps.py`` (the walk over decode steps, and their columns), ``guidance.py``
(the work of a value model), ``drafts.py`` (speculation), ``costs/`` (the time of a step);
``counted.py`` runs loads of lengths alone without objects. Requests come in by
``core.py``: all at once (``simulate`` and ``virtual.py``), or one by one over HTTP (``http/``).
``predict.py`` simulates a plan before it is measured.
"""
