"""Losses over a pool: what they sum depends on the order of all rows."""
