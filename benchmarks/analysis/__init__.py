"""Time and memory of show, compare and the report page on large directories; agreement of judges."""
