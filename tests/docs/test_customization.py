"""The examples of docs/customization.md are hooks that pass the check made at start, and do what the page says."""

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.fakes import FakeEngines, char_tokenizer, seeded_digits
from tests.loop.test_batch import make, two_groups
from tests.rollout.bench import Bench
from vime.config import AlgoConfig, Config, RewardConfig, RolloutConfig
from vime.config.hook_table import HOOKS, load_path
from vime.loop.batch_hooks import BatchHooks
from vime.protocols import RolloutContext, TrainerContext
from vime.rewards.pool import GraderPool

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "customization.md").read_text(encoding="utf-8")
# The example of each hook; those of the data page are tried by tests/data.
EXAMPLES = {
    "rollout-function-path": "twice_as_patient",
    "eval-function-path": "twice_as_patient",
    "custom-generate-function-path": "generate",
    "rollout-sample-hook-path": "strip_thoughts",
    "custom-rm-path": "reward",
    "dynamic-sampling-filter-path": "mostly_finished",
    "rollout-sample-filter-path": "not_the_truncated",
    "rollout-all-samples-process-path": "keep_failures",
    "custom-convert-samples-to-train-data-path": "with_turns",
    "custom-reward-post-process-path": "against_a_constant",
    "custom-pg-loss-reducer-function-path": "constant_length",
    "custom-advantage-function-path": "with_kl_penalty",
    "rollout-data-postprocess-path": "without_outliers",
    "custom-loss-function-path": "reinforce",
    "custom-tis-function-path": "squashed",
    "custom-model-provider-path": "frozen_embedding",
    "custom-megatron-init-path": "announce",
    "custom-megatron-before-log-prob-hook-path": "before_log_prob",
    "custom-megatron-before-train-step-hook-path": "before_step",
    "custom-update-weight-post-write-path": "copy_to_other_nodes",
    "custom-rollout-log-function-path": "log_rollout",
    "custom-eval-rollout-log-function-path": "log_eval",
}
ELSEWHERE = {"data-source-path", "buffer-filter-path", "rm-parts"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """All examples of the page in one module."""
    folder = tmp_path_factory.mktemp("page")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (folder / "customization_page.py").write_text("\n\n".join(blocks), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        yield importlib.import_module("customization_page")
    sys.modules.pop("customization_page", None)


def test_every_hook_has_its_row_its_words_and_its_example() -> None:
    flags = {row.flag.removeprefix("--") for row in HOOKS}
    assert flags == EXAMPLES.keys() | ELSEWHERE
    below = PAGE.split("generated: end")[1]
    assert not [flag for flag in flags if f"--{flag}" not in below]


@pytest.mark.parametrize("row", [row for row in HOOKS if row.flag[2:] in EXAMPLES], ids=lambda row: row.flag)
def test_each_example_passes_the_check_at_start(row: Any, page: ModuleType) -> None:
    assert callable(load_path(Config(), row.key, f"customization_page.{EXAMPLES[row.flag[2:]]}"))


def test_the_rollouts_examples_work_together(page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = char_tokenizer()
    pool = GraderPool()
    bench = Bench(
        tokenizer,
        pool,
        FakeEngines(seeded_digits(tokenizer)),
        reward={"custom_rm_path": "customization_page.reward"},
        rollout_function_path="customization_page.twice_as_patient",
        custom_generate_function_path="customization_page.generate",
        rollout_sample_hook_path=["customization_page.strip_thoughts"],
        dynamic_sampling_filter_path="customization_page.mostly_finished",
        rollout_sample_filter_path="customization_page.not_the_truncated",
        rollout_all_samples_process_path="customization_page.keep_failures",
        custom_rollout_log_function_path="customization_page.log_rollout",
        custom_eval_rollout_log_function_path="customization_page.log_eval",
    )
    stage = bench.stage(tmp_path)
    result = stage.generate(0)
    assert result.metrics["custom/turns"] == 2 and result.metrics["custom/groups"] == 4
    (first, *_) = result.groups[0].samples
    check = tuple(tokenizer.encode("\ncheck: ", add_special_tokens=False))
    assert first.loss_mask == (1,) * 4 + (0,) * len(check) + (1,) * 4
    assert first.response_tokens[4 : 4 + len(check)] == check
    assert stage.evaluate(0).metrics["custom/eval_groups"] == 2
    pool.close()


def test_the_examples_between_rollout_and_trainer_work_together(page: ModuleType) -> None:
    config = Config(
        rollout=RolloutConfig(
            rollout_max_response_len=8, custom_convert_samples_to_train_data_path="customization_page.with_turns"
        ),
        reward=RewardConfig(custom_reward_post_process_path="customization_page.against_a_constant"),
        algo=AlgoConfig(custom_pg_loss_reducer_function_path="customization_page.constant_length"),
    )
    engines = FakeEngines(lambda request, i: ([], "stop"))
    context = RolloutContext(config, engines, None, reward=None)  # type: ignore[arg-type]
    batch, _ = make(two_groups(), hooks=BatchHooks.load(context))
    assert batch.advantages.tolist() == [0.5, -0.5, 1.5, 1.5]
    assert batch.extra["turns"].tolist() == [1] * 4
    old = batch.rollout_log_probs + np.float32(2.0)
    seen = replace(batch, extra={**batch.extra, "old_log_probs": old})
    trainer = TrainerContext(config, 0, 1)
    assert page.with_kl_penalty(trainer, seen)[2] == pytest.approx(0.5 - 0.01 * 2)
    assert not page.without_outliers(trainer, 0, seen).loss_mask.any()


def test_the_example_of_importance_weights_stays_below_two(page: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    from vime.protocols import CorrectionInputs

    first, sampled = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -9.0])
    inputs = CorrectionInputs(
        old_log_probs=first,
        rollout_log_probs=sampled,
        pg_loss=first,
        advantages=first,
        weights=torch.tensor([0.5, 0.5]),
        samples=torch.tensor([0, 0]),
        sequence_mean=lambda values: values.mean().expand(2),
        sequence_sum=lambda values: values.sum().expand(2),
    )
    weights, metrics = page.squashed(None, inputs)
    assert weights[0] == 1 and 1.99 < weights[1] < 2
    assert float(metrics["sequence_kl"]) == pytest.approx(-4)


def test_the_example_of_a_loss_is_reinforce(page: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    from vime.protocols import LossInputs

    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    fixed = torch.tensor([-1.5, -2.0])
    inputs = LossInputs(
        log_probs=log_probs,
        entropy=fixed,
        old_log_probs=fixed,
        rollout_log_probs=fixed,
        ref_log_probs=None,
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.tensor([0.25, 0.5]),
        tokens=torch.tensor([3, 4]),
        samples=torch.tensor([0, 1]),
        extra={},
    )
    loss, metrics = page.reinforce(None, inputs, inputs.sum_of_sample_mean)
    loss.backward()
    assert log_probs.grad.tolist() == [-0.25, 0.5]
    assert float(metrics["drift"]) == pytest.approx(-0.5 * 0.25)
