"""Everything that touches processes and devices: server, samplers, one whole run, the experiment."""
