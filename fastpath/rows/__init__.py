"""Operators that work on one row at a time: norms, RoPE, SwiGLU, the residual add, the embedding, the vocabulary."""
