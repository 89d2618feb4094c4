"""Record types, schema versions and the result directory: the only meeting point of the two halves."""
