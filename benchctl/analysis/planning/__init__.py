"""The power of an experiment before it is measured, the noise of the machine that it depends on, and planned looks.

``power`` needs the noise floor on file, which ``noise_floor`` derives from an A/A experiment.
"""
