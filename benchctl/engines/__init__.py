"""The engines: one folder for each kind of server software, with its ``SPEC``, options and implementation.

``engine`` is the contract that each fulfils, ``openai_server`` the base that most share, ``kinds`` loads one by its
name. An engine says how its servers are started, addressed and read; it starts nothing itself.
"""
