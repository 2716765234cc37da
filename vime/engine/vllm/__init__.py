"""vLLM as the rollout engine: its server process, its clients, the router in front, and its end of the weight sync."""
