"""Predictions of a profile before it is measured, from a simulation of its load."""
