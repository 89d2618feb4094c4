"""The parts of a guided step that a GPU should do with one launch each: their meaning in torch, and their names.

``layers`` has those of the value model, ``sampling`` those of a step's probabilities; ``registry`` makes each known
to torch's dispatcher, so that kernels can take the place of what torch would do with many launches.
"""
