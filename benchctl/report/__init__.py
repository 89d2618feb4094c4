"""Analysis results as tables, CSV, JSON and pictures. Nothing here prints."""
