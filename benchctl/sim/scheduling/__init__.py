"""Rows of a batch and blocks of key-value memory."""
