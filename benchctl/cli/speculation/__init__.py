"""``benchctl speculation``: its command, options, server and output."""
