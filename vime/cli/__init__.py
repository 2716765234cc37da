"""The command line: flags of vime, Megatron, vLLM and vllm-router in one grammar, and the `vime` command."""
