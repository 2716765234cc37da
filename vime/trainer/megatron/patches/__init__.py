"""What megatron-core 0.16.1 needs before it runs here: mended, replaced, or refused."""
