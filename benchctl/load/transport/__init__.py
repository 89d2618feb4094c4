"""Bytes to and from the server: connections, requests on the wire, and arrivals with the kernel's timestamps.

``client`` sends an exchange and returns it with its answer; the schedule of a load is in ``driver``.
"""
