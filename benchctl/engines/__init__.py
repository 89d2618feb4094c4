"""The engines: a module or folder for each kind of server software, with its options and implementation.

``engine`` is the base of all and loads one by its name; what runs inside servers is in ``inside``. An engine says
how its servers are started, addressed and read; it starts nothing itself.
"""
