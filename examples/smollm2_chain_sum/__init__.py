"""SmolLM2 on chain_sum: GRPO with a reward of its own."""
