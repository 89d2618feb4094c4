"""Model directories of random weights, to try real inference engines without a download.

A directory has a configuration, a tokenizer and weights, and one GGUF file for llama.cpp; its text is nonsense, its
work is real. Nothing here needs a network, torch or transformers.
"""
