"""Operators over ranks: the library carries bytes, every rank adds in the same tree."""
