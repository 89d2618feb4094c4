"""Long step logs and request files as columns of numbers, and the copies of them that are read quickly."""
