"""The load generator beside others: what a token costs, how exact its times are, whether it keeps its schedule."""
