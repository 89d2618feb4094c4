"""A streamed answer from raw bytes to tokens: server-sent events, choices, usage, errors.

Nothing here uses sockets or clocks.
"""
