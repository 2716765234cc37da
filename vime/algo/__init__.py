"""The algorithms as pure functions: arrays in, arrays out, no settings object, no I/O.

Shape letters: B samples, T packed tokens (the sum of the samples' lengths), V vocabulary.

What becomes a loss (policy_loss, kl, correction) works on torch tensors; what only arranges a finished rollout
(advantages, reduce, mismatch) works on numpy arrays in float64, so that the driver needs no torch.
"""
