"""Model shapes from ``config.json``: the keys of Hugging Face checkpoints in all their spellings.

``shape.py`` reads a file, ``experts.py`` its keys about experts, ``weights.py`` those about quantisation, and
``keys.py`` checks each value.
"""
