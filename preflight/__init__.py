"""A check of the user's cluster, with its backend and devices, to run before the first training."""
