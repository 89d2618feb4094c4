"""LenVM guidance for a stock inference server: a value model that predicts the rest of an answer steers sampling.

Reading guide. ``parameter_table`` declares what a request may ask, ``params`` parses it, ``candidates`` which
tokens it may get, ``modes`` (with ``expectation``) the distribution among them, ``guide`` one decode step of a
batch. All of that is mathematics over tensors and knows no server. ``value_model`` (from a ``checkpoint``) is the
model that values come from, ``scoring`` keeps the prefixes of requests and runs it: ``layout`` arranges its tokens,
``slots`` assigns prefixes to requests.

This room runs inside the server's own environment: it imports only torch, ``units`` and ``errors``, and importing
the package itself imports nothing.

It is not a sampler: it rewrites logits and leaves the draw, and the rows that are not guided, to the server.
"""
