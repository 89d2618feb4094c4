"""Tables of results, for the terminal and as Markdown."""
