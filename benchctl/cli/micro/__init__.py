"""Commands of ``benchctl micro``."""
