"""Quality of a model on steps that it was not fitted to, and the runs that would improve it."""
