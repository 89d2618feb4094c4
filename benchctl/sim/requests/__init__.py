"""Requests as the core sees them: prompts, planned answers, phases of load, and what became of each."""
