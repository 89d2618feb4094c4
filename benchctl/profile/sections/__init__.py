"""The sections of a profile: their keys, types and meanings."""
