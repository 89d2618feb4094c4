"""Cost models of the simulator: how long a step takes. ``pricing`` lists them by name."""
