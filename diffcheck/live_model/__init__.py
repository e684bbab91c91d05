"""What the modules of a live model compute with, as plain data: numbers and switches by layer, tables of RoPE."""
