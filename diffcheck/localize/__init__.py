"""Localise: compare two traces and name the first boundary whose inputs are equal and whose output is not."""

from diffcheck.localize.first_divergence import graph_of, localize

__all__ = ["graph_of", "localize"]
