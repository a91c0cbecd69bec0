"""Losses that are sums over rows, divided by a count."""
