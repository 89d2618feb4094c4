"""One load on one running server, without an experiment around it: ``benchctl load``.

Requests are read from the file, and records are reduced at once, so that memory stays constant.
"""
