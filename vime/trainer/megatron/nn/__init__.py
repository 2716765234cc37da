"""What a model is made of: Megatron modules from torch's own kernels."""
