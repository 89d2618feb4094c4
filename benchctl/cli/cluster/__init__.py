"""Commands and parts of ``run`` for experiments whose blocks are measured in several places."""
