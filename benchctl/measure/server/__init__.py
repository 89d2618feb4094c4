"""The server of a run: its process with everything that it starts, its port, its log, and its end.

``server`` ties them together; every process that is started here is ended here.
"""
