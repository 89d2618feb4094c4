"""Questions of capacity, answered in virtual time: the largest load under an objective, the best setting for it.

``objective`` says what must hold, ``point`` simulates one load, ``search`` finds the largest that still holds it.
"""
