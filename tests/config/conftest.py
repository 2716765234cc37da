from __future__ import annotations

import json
from pathlib import Path

import pytest

from vime.config import CheckpointConfig, Config, DataConfig, RewardConfig, RolloutConfig


@pytest.fixture
def right(tmp_path: Path) -> Config:
    """Settings that nothing is wrong with."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    return Config(
        checkpoint=CheckpointConfig(hf_checkpoint="model"),
        data=DataConfig(prompt_data=[str(prompts)], label_key="label"),
        rollout=RolloutConfig(num_rollout=1, rollout_batch_size=8, n_samples_per_prompt=4, rollout_max_response_len=8),
        reward=RewardConfig(rm_type="exact_match"),
        megatron={"lr": 1e-6},
    )
