"""Prompts, the data buffer, and packing: plain Python and numpy, seeded, resumable."""
