"""One module for each command: its options, and the few steps that it calls and prints."""
