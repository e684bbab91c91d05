"""Attention and its gradients, and the paged key/value cache that it reads."""
