"""Trainers: who computes log-probs, losses and optimizer steps."""
