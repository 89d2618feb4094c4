"""Backfill of a bonus token: by expansion of a decode batch, or by a prefill pass of its own.

A bonus token comes from the target model, so the draft model lacks its keys and values. Before the next draft
they are computed in one of two ways. Batch expansion adds a row to the next decode for each sequence that lacks
them; its cost is T(B + m) - T(B) for m rows. A prefill pass computes m tokens by themselves; its cost is the
whole pass.

``bonus`` has the passes to measure and their comparison, ``sentences`` the verdict in words.
"""
