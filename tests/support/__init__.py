"""Shared by the tests: result directories with a known truth, servers, guidance references, a browser."""
