"""Step-time models: features of a step's work, fit, prediction, diagnosis and calibration; pure.

``work.py`` describes the work of steps and the deployment that does it, ``features.py`` turns both
into times at the data sheet's peaks, ``model.py`` holds a fitted model and its file. ``fit.py`` fits one,
``evaluate.py`` judges it on runs that it has not seen, and ``diagnose.py`` names the runs to add. ``queueing.py``
predicts the load of a server, ``layers.py`` prices steps by the measured tables of ``layer_tables.py``, and
``acceptance.py``, ``speculation_law.py`` and ``speculation_load.py`` say what drafts are worth.
"""
