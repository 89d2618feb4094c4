"""Other load generators, how each is started and its results are parsed, and the least that any client must do."""
