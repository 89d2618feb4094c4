"""The tokenizer of an experiment's prompts: found in files, or asked of a server.

``choice`` picks the one that counts as the servers of the experiment do.
"""
