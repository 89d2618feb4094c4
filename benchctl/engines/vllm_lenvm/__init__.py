"""vLLM guided by a value model: a stock server with our logits processor. Its counters are vLLM's."""
