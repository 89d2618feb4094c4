"""The value model and its forward pass: checkpoint, layout of tokens, cached prefixes, scores of candidates.

Imports torch; knows no server.
"""
