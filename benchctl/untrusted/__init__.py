"""What others wrote: files, texts and numbers of unknown origin, read within bounds and shown without harm."""
