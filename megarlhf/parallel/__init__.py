"""Ranks as a small array, process groups as its slices, and the collectives that work on tokens and rows."""
