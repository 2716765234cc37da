"""Runnable examples; imported by dotted path from the repository root."""
