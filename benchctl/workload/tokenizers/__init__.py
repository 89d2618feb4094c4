"""Tokenizers: the number of tokens that a server makes of a prompt."""
