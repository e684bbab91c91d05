"""Conformance vectors: inputs and exact output bits of every operator under every profile (see README.md here)."""

from reference.vectors.files import DATA, VERSION, read_vectors, vector_file, vector_files

__all__ = ["DATA", "VERSION", "read_vectors", "vector_file", "vector_files"]
