"""Step-time models: features of a step's work, fit, prediction, diagnosis and calibration; pure.

``work.py`` describes the work of steps and the deployment that does it, ``features.py`` turns both into times at
the data sheet's peaks, ``model.py`` holds a fitted model and ``model_file.py`` its file. ``fit.py`` fits one,
``evaluate.py`` judges it on runs that it has not seen, ``diagnose.py`` names the runs to add.
"""
