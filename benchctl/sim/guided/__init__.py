"""The decoding rows that a value model scores: one by one, or drawn together."""
