"""Step-time models: features of a step's work, fit, prediction, diagnosis and calibration; pure.

``work.py`` describes the work of steps and the deployment that does it, ``features.py`` turns both into times at
the data sheet's peaks, ``model.py`` holds a fitted model and its file.
"""
