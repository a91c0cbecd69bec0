"""Losses of embeddings: own rows against the rows of all ranks, block by block."""
