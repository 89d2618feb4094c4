"""Files, texts and numbers that others wrote, of unknown origin: read within bounds and shown without harm."""
