"""The check of a user's own cluster, on its own backend and devices, before anything is trained there."""
