"""Tables as headings, rows and footnotes, for terminals and Markdown."""
