"""What a run leaves for people: a summary, figures, one HTML file, and TensorBoard events."""
