"""Losses of embeddings: this rank's rows against the rows of all ranks, block by block."""
