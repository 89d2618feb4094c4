"""Speculative decoding: tokens per step, speed-up and goodput, with and without the bonus token."""
