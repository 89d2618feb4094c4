"""Going on with an experiment that was begun: its rest, where it may go on, further blocks, attempts."""
