"""A change of known size for a real server; the folder is on the server's ``PYTHONPATH``."""
