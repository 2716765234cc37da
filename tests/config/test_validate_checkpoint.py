"""What is kept must be something that a step has."""

from dataclasses import replace
from pathlib import Path

from vime.config import CheckpointConfig, Config, EvalConfig
from vime.config.validate_checkpoint import check_checkpoints
from vime.config.validate_files import check_paths


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


def test_a_run_goes_on_with_its_folder_however_that_is_spelt(tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "a").mkdir()
    same = [f"{folder}/", f"{tmp_path}/./a/../saves", str(tmp_path / "link" / "saves")]
    assert all(CheckpointConfig(save=str(folder), load=load).goes_on for load in same)
    for load in same:  # which is not there yet
        assert list(check_paths(Config(checkpoint=CheckpointConfig(save=str(folder), load=load)))) == []
    assert not CheckpointConfig(save=str(folder), load=str(tmp_path)).goes_on
    assert not CheckpointConfig(save=str(folder)).goes_on and not CheckpointConfig().goes_on
