"""Results as JSON and CSV documents, with numbers at full precision."""
