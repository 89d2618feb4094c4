"""Bytes to and from the server: connections, requests on the wire, and arrivals with the kernel's time stamps.

``client`` sends an exchange and gives it back answered; how a load is scheduled is not known here.
"""
