"""What is kept must be something that a step has."""

from dataclasses import replace

from vime.config import CheckpointConfig, Config, EvalConfig
from vime.config.validate_checkpoint import check_checkpoints


def problems(best: str | None, **sections: object) -> list[str]:
    config = replace(Config(), checkpoint=CheckpointConfig(keep_best_checkpoint=best), **sections)  # type: ignore[arg-type]
    return list(check_checkpoints(config, lambda name: "no such metric" if "lost" in name else None))


def test_a_metric_of_every_step_needs_nothing() -> None:
    assert problems(None) == problems("train/loss:min") == problems("rollout/raw_reward") == []


def test_a_held_out_metric_needs_held_out_sets() -> None:
    assert "nothing is evaluated" in problems("eval/heldout")[0]
    sets = EvalConfig(eval_prompt_data=["heldout", "x.jsonl", "held-in", "y.jsonl"])
    for metric in ("eval/heldout", "eval/heldout-pass@2", "eval/held-in", "eval/held-in-reward/acc:min"):
        assert problems(metric, eval=sets) == []
    (problem,) = problems("eval/helout", eval=sets)
    assert problem == "--keep-best-checkpoint is eval/helout, but the held-out sets are heldout, held-in"


def test_a_word_that_is_no_metric_is_named() -> None:
    assert "--keep-best-checkpoint is 'accuracy'" in problems("accuracy")[0]
    assert problems("train/lost") == ["--keep-best-checkpoint is train/lost, no such metric"]
