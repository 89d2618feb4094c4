"""Stretches of decode steps, and the columns in which the steps of a server life are kept."""
