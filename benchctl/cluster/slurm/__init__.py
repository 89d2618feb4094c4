"""Blocks as tasks of an array job of Slurm, submitted by submitit."""
