"""Measurements of this machine that outlast an experiment: its noise, its peaks, and how long runs take."""
