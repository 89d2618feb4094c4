"""A server that someone else started, addressed in the dialect of its kind and never watched or ended."""
