"""Measuring candidates and choosing winners."""
