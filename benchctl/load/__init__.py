"""The load generator: requests go out when they should, and what comes back is stamped when it arrives."""
