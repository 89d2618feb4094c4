"""Request set and arrival schedule: what will be asked, and when; seeded, the same bytes on every machine."""
