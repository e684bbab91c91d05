"""What all of `diffcheck` and `integration` stand on: errors, files, models, samples, records, bits, boundaries."""
