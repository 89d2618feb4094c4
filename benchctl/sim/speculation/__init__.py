"""Speculative decoding: drafts of the decoding rows, their acceptance, and the price of both models."""
