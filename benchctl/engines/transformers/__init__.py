"""``transformers serve``: how it is started, asked and read; ``inside`` runs in the server's own environment."""
