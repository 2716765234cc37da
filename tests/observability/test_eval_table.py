"""The table of an evaluation."""

from vime.observability.eval_table import eval_table, set_of


def test_each_set_has_a_line_and_columns_are_those_that_any_set_has() -> None:
    table = eval_table(
        {
            "eval/math-500": 0.5,
            "eval/math-500-stderr": 0.0625,
            "eval/math-500-num_prompts": 500.0,
            "eval/math-500-num_samples": 500.0,
            "eval/math-500-num_dropped_prompts": 0.0,
            "eval/math-500-truncated_ratio": 0.25,
            "eval/math-500-failed_ratio": 0.0,
            "eval/math-500-reward_unparseable": 0.01,
            "eval/math-500-reward_timeout": 0.0,
            "eval/math-500-response_len/mean": 1234.56,
            "eval/math-500-response_len/max": 2000.0,
            "eval/aime": 0.1,
            "eval/aime-pass@16": 0.4,
            "eval/aime-pass@2": 0.2,
            "eval/aime-num_dropped_prompts": 3.0,
            "perf/eval_time": 1.0,
        }
    )
    assert table.splitlines() == [
        "set       prompts  dropped  samples  reward  stderr  pass@2  pass@16  length  truncated  failed  unparseable",
        "math-500      500               500   0.500   0.062                   1234.6      25.0%    0.0%         1.0%",
        "aime                     3            0.100           0.200    0.400",
    ]


def test_a_sets_score_is_told_from_its_details() -> None:
    assert set_of("eval/gsm8k-test") == "gsm8k-test"
    for other in ("eval/gsm8k-test-pass@4", "eval/a-response_len/mean", "eval/a-num_prompts", "train/loss"):
        assert set_of(other) is None
