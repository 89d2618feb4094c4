"""Formats that belong to somebody else: read, converted and written, and nowhere else mentioned."""
