"""Everything that touches processes, sockets and devices: server, client, load, samplers, and one whole run."""
