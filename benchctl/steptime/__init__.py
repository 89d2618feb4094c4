"""Step-time models: features of a step's work, fit, prediction, diagnosis and calibration; pure.

``work.py`` describes the work of steps and the deployment that does it, ``features.py`` turns both into times at
the data sheet's peaks (from ``terms``), ``model.py`` holds a fitted model and ``model_file.py`` its file.
``fitting/fit.py`` fits one, ``diagnosis/evaluate.py`` judges it on runs that it has not seen, and
``diagnosis/diagnose.py`` names the runs to add. ``queueing.py`` predicts the load of a server, ``layers`` prices
steps by measured tables.
"""
