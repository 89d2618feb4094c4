"""Data sets of the user's own: rows in a file, and files of the Hugging Face Hub."""
