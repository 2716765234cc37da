"""The report takes the newest line that fits, and is content only when every figure is there and met."""

import json
from pathlib import Path
from typing import Any

from benchmarks import report

STEP = {
    "model": "qwen3-0.6b",
    "layout": "colocated",
    "steps": 3,
    "step_s": 25.0,
    "of_offline_vllm": 0.95,
    "mfu": 0.46,
    "trainer_adds_bytes": 12,
    "other_share": 0.04,
}
GOOD: dict[str, list[dict[str, Any]]] = {
    "step_time_h200.jsonl": [
        STEP,
        {"peer": "trl", "steps": 3, "step_s": 50.0, "trainer_adds_bytes": 20},
        {"model": "qwen3-30b-a3b", "num_layers": 6, "layout": "colocated", "steps": 3, "mfu": 0.35},
        {"model": "qwen3-0.6b", "layout": "ahead", "steps": 3, "of_the_longer": 1.05},
    ],
    "weight_sync_h200.jsonl": [
        {"model": "qwen3-0.6b", "transport": "ipc", "seconds": 0.2},
        {"model": "qwen3-4b", "transport": "nccl", "seconds": 0.5, "broadcast_gb_per_second": 150.0},
    ],
    "sleep_wake_h200.jsonl": [{"model": "qwen3-0.6b", "sleep_and_wake_s": 0.45}],
}


def told(folder: Path, results: dict[str, list[dict[str, Any]]]) -> tuple[str, bool]:
    for name, rows in results.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, whole = report.report(report.Results(folder))
    return text.splitlines()[-1], whole


def test_all_there_and_met(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD) == ("all 10 figures are there and met", True)


def test_the_last_line_names_what_is_not_met_and_what_is_missing(tmp_path: Path) -> None:
    rows = [*GOOD["step_time_h200.jsonl"], STEP | {"step_s": 31.0}]
    last, whole = told(tmp_path, GOOD | {"step_time_h200.jsonl": rows, "sleep_wake_h200.jsonl": []})
    assert last == "not met: W1 step, colocated, part of TRL's best · missing: sleep and wake, 0.6B, s"
    assert not whole


def test_a_newer_line_counts_also_where_an_older_one_was_short(tmp_path: Path) -> None:
    rows = [STEP | {"of_offline_vllm": 0.5}, *GOOD["step_time_h200.jsonl"]]
    assert told(tmp_path, GOOD | {"step_time_h200.jsonl": rows})[1]


def test_a_run_that_was_ended_early_does_not_count(tmp_path: Path) -> None:
    rows = [*GOOD["step_time_h200.jsonl"], {"peer": "trl", "steps": 2, "step_s": 90.0, "trainer_adds_bytes": 90}]
    last, whole = told(tmp_path, GOOD | {"step_time_h200.jsonl": rows})
    assert last.startswith("missing: W1 step, colocated, part of TRL's best; device memory") and not whole


def test_a_sync_over_nccl_counts_only_beside_the_bare_broadcast(tmp_path: Path) -> None:
    ipc, nccl = GOOD["weight_sync_h200.jsonl"]
    bare = {name: value for name, value in nccl.items() if name != "broadcast_gb_per_second"}
    last, whole = told(tmp_path, GOOD | {"weight_sync_h200.jsonl": [ipc, bare]})
    assert last == "missing: weight sync over NCCL, two devices, 4B, s" and not whole


def test_an_optimizer_step_alone_tells_the_mfu_where_no_whole_step_does(tmp_path: Path) -> None:
    rows = [row for row in GOOD["step_time_h200.jsonl"] if row.get("model") != "qwen3-30b-a3b"]
    alone = [{"model": "qwen3-30b-a3b", "num_layers": 6, "mfu": 0.30}]
    assert told(tmp_path, GOOD | {"step_time_h200.jsonl": rows, "train_step_h200.jsonl": alone})[1]


def test_the_picture_has_every_figure(tmp_path: Path) -> None:
    told(tmp_path, GOOD | {"sleep_wake_h200.jsonl": []})
    report.plot(report.Results(tmp_path), tmp_path / "report.svg")
    text = (tmp_path / "report.svg").read_text()
    assert all(f"<!-- {figure.name}" in text for figure in report.FIGURES)


def test_a_figure_is_met_where_all_of_its_bar_is_reached() -> None:
    for figure in report.FIGURES:
        bar = figure.most if figure.most is not None else figure.least
        assert bar is not None and figure.is_met(bar) and figure.reached(bar) == 1
        assert figure.reached(bar * 1.1) > 1 if figure.most is None else figure.reached(bar * 1.1) < 1
