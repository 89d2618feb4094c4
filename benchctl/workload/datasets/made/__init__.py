"""Data sets made from the seed of the profile, without a file."""
