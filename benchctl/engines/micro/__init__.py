"""Forward passes of a model with random weights: no server, no requests, one record for each pass."""
