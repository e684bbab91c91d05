"""The strict path inside real engines: their forward made of the reference operators, bit for bit."""
