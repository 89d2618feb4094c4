"""Comparability of two sides: settings that differ, and those whose difference the profile says itself."""
