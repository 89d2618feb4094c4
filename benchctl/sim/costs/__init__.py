"""Cost models of the simulator, which price a step; ``benchctl/profile/choices.py`` lists them by name."""
