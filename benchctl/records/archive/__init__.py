"""Archives of result directories: written the same way each time, and opened wherever a directory is."""
