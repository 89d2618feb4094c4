"""Lint of load-generator configurations: loads that do not measure what their file says.

``findings.py`` holds what a rule finds, ``offered.py`` the load that a configuration asks for, ``prompts.py`` and
``schedules.py`` the rules, ``lint.py`` all of them together.
"""
