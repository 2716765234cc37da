"""One run's rollout function, data and engines, for the rollout's tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fakes import FakeEngines, seeded_digits
from vime.config import Config, DataConfig, EvalConfig, RewardConfig, RolloutConfig
from vime.data.buffer import DataBuffer
from vime.data.prompt_set import Prompt
from vime.data.sample_json import sample_to_json
from vime.observability.metrics import check_names
from vime.protocols import RolloutContext
from vime.rewards.pool import GraderPool
from vime.rewards.score import make_reward_function
from vime.rollout.eval_data import load_eval_sets
from vime.rollout.stage import RolloutStage
from vime.rollout.vllm_rollout import generate_rollout
from vime.types import Group, RolloutResult

HOOKS = "tests.rollout.hooks"


class Bench:
    """A rollout function, its data and its engines, as one run has them."""

    def __init__(
        self,
        tokenizer: Any,
        pool: GraderPool,
        engines: FakeEngines | None = None,
        *,
        reward: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        **rollout: Any,
    ) -> None:
        settings = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_max_response_len": 8} | rollout
        self.config = Config(
            data=DataConfig(rollout_seed=11),
            rollout=RolloutConfig(**settings),
            reward=RewardConfig(**({"rm_type": "exact_match"} if reward is None else reward)),
        )
        self.engines = engines or FakeEngines(seeded_digits(tokenizer, length=1))
        prompts = [
            Prompt(
                f"{i}=",
                tuple(tokenizer(f"{i}=", add_special_tokens=False)["input_ids"]),
                label=str(i),
                metadata=metadata or {},
            )
            for i in range(10)
        ]
        self.source = DataBuffer(prompts, n_samples_per_prompt=settings["n_samples_per_prompt"], shuffle=False, seed=0)
        self.context = RolloutContext(
            self.config, self.engines, tokenizer, make_reward_function(self.config.reward, pool)
        )

    def stage(self, folder: Path) -> RolloutStage:
        """What the loops call; with one held-out set of two prompts, in a file of this folder."""
        path = folder / "held.jsonl"
        path.write_text('{"input": "1=", "label": "1"}\n{"input": "2=", "label": "2"}\n')
        held_out = replace(
            self.config, data=DataConfig(label_key="label"), eval=EvalConfig(eval_prompt_data=["held", str(path)])
        )
        return RolloutStage(self.context, self.source, load_eval_sets(held_out, self.context.tokenizer))

    def run(self, rollout_id: int = 0) -> RolloutResult:
        result = generate_rollout(self.context, rollout_id, self.source, self.engines)
        check_names(result.metrics)
        return result


def ids(result: RolloutResult) -> list[int]:
    return [group.group_id for group in result.groups]


def contents(groups: list[Group]) -> list[Any]:
    """All of it but when it happened."""
    return [sample_to_json(sample) | {"trace": []} for group in groups for sample in group.samples]
