"""Options that commands share, and the words that a shell completes."""
