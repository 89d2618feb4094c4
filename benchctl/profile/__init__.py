"""YAML to a validated frozen Profile, and the Profile to ordered runs; pure but for reading files."""
