"""Step-time models and measured experiments: the steps of a run as input of a model."""
