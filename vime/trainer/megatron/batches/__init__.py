"""Micro-batches: how sequences lie in them, and what travels with their tokens."""
