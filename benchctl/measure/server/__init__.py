"""The server of a run: its process with all its children, its port, its log, and its end.

``server`` combines them; every process that is started here is ended here.
"""
