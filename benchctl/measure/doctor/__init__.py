"""Checks of a machine before anything is measured on it: GPUs, host, client, installed engines.

Each check is one value with a state and a remedy; ``cli`` prints them.
"""
