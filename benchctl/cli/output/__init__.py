"""Tables, documents and progress of commands, on the terminal and in files."""
