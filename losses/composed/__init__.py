"""Losses made of other losses."""
