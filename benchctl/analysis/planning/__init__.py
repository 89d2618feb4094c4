"""What an experiment will be able to show, and the noise of the machine that this depends on.

Computed before anything is measured, from the noise floor on file.
"""
