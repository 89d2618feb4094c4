"""One load on one running server, without an experiment around it: ``benchctl load``.

Requests are read from the file and records reduced as they pass, so that memory stays constant.
"""
