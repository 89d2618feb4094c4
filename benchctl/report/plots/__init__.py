"""Pictures as PNG files, drawn with matplotlib."""
