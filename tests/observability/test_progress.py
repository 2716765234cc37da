import io
import subprocess
import sys

from rich.console import Console

from vime.observability.progress import RunProgress, step_line

METRICS = {
    "rollout/raw_reward": 0.5119,
    "train/loss": 0.1,
    "train/train_rollout_logprob_abs_diff": 3.14e-7,
    "train/train_rollout_logprob_abs_diff_max": 2e-6,
    "perf/rollout_time": 1.2,
    "perf/train_time": 0.8,
    "perf/actor_train_time": 0.7,
    "perf/step_time": 2.314,
    "eval/two-digit": 0.75,
    "eval/two-digit-truncated_ratio": 0.1,
}


def test_a_line_says_reward_difference_time_and_accuracy():
    assert step_line(11, 120, METRICS) == (
        "rollout  12/120 · reward 0.512 · log-prob diff 3.1e-07 (max 2.0e-06) · "
        "step 2.31 s (rollout 1.20, train 0.80) · eval two-digit 0.750"
    )


def test_supervised_steps_show_the_loss():
    assert step_line(0, 5, {"train/loss": 1.23456}) == "rollout 1/5 · loss 1.2346"


def plain(now):
    out = io.StringIO()
    return out, RunProgress(3, console=Console(file=out, force_terminal=False, width=60, soft_wrap=True), clock=now)


def test_without_a_terminal_there_are_only_whole_lines():
    now = [0.0]
    out, progress = plain(lambda: now[0])
    with progress:
        progress.stage("starting engines")
        progress.stage("rollout")  # at once after a line: not worth another
        now[0] += 11
        progress.stage("train")
        progress.step(0, METRICS)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["… starting engines", "… train"]
    assert lines[2] == step_line(0, 3, METRICS), "not wrapped"
    assert "\x1b" not in out.getvalue()


def test_markup_in_text_is_left_alone():
    out, progress = plain(lambda: 0.0)
    progress.message("[bold]x[/bold] [/oops]")
    assert out.getvalue() == "[bold]x[/bold] [/oops]\n"


def test_on_a_terminal_the_lines_scroll_by_too():
    out = io.StringIO()
    with RunProgress(3, console=Console(file=out, force_terminal=True, width=200)) as progress:
        progress.stage("rollout")
        progress.step(0, METRICS)
    assert "reward 0.512" in out.getvalue()


def test_fast_rollouts_share_a_line_in_a_long_run_only():
    def lines(num_rollout):
        out = io.StringIO()
        progress = RunProgress(num_rollout, console=Console(file=out, force_terminal=False), clock=lambda: 0.0)
        for rollout_id in range(num_rollout):
            progress.step(rollout_id, {})
        return len(out.getvalue().splitlines())

    assert lines(50) == 50
    assert lines(60) == 2, "the first and the last"


def test_a_run_goes_on_where_nobody_reads_its_output_any_more():
    code = (
        "import sys; from vime.observability.progress import RunProgress\n"
        "with RunProgress(9) as progress:\n"
        "    progress.message('first')\n"
        "    sys.stdin.read()\n"
        "    for _ in range(3): progress.message('unread'); print('unread', flush=True)\n"
        "    print('at its end', file=sys.stderr)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stdin.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, said
    assert said == "vime: nobody reads the standard output any more; the run goes on\nat its end\n"
