"""References for tests of guidance in plain Python, small models, and stand-ins for a device and for a server."""
