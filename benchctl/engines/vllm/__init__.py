"""vLLM: options, start, requests and step log; ``inside`` runs in the server's own environment."""
