"""Model directories of random weights, to try real inference engines without a download.

What is written is a causal language model as engines expect it: configuration, tokenizer, weights, and for
llama.cpp one GGUF file. Its text is nonsense, its work is real. Nothing here needs a network, torch or
transformers.
"""
