"""The optimizer: its step, its kernels, and where its state lies."""
