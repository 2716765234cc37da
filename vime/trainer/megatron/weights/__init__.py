"""Weights on their way in, out and between the sets that a rank keeps."""
