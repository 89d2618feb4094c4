"""What measuring adds: overhead of a run, step logs, GPU samples, and the end of a server that is killed."""
