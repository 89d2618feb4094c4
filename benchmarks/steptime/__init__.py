"""Step-time models and the simulator against real runs."""
