"""Step time from measured tables of a model's layers: interpolation, and the sum over a forward pass.

``line.py`` interpolates one axis, ``attention.py`` the grid of attention, ``verification.py`` extends it to drafts,
``profile.py`` adds layers up.
"""
