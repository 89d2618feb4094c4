"""Datasets: where files come from, and how their rows become prompts."""
