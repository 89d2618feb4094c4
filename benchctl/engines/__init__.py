"""The engines: one folder for each kind of server software, with its ``SPEC``, options and implementation.

``engine`` is the contract that each fulfils and loads one by its name; ``openai_server`` is the base that most
share. An engine says how its servers are started, addressed and read; it starts nothing itself.
"""
