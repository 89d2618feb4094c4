"""Validity of measurements: reconciliation, the load client, gates, comparability, integrity.

Each module returns warnings as data; ``usability`` decides from them which runs count, and for what.
"""
