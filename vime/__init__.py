"""vime: post-train language models with reinforcement learning on Megatron-core and vLLM."""

__version__ = "0.1.0"
