"""How well HF, trainer and engine agree on the same tokens under the same weights.

    python -m benchmarks.agreement --cpu                 # float32, tiny models, minutes
    python -m benchmarks.agreement --cuda                # the same in bf16, within HF's own rounding
    python -m benchmarks.agreement --drift RUN …         # finished runs: no upward drift
    python -m benchmarks.agreement --drift DENSE --without RUN … --with RUN …    # and R3 beside them, pair by pair

--cpu and --cuda make a small random dense model and small random mixtures of experts, let an engine sample from each,
and score the samples by trainer and HF. A row is a model; without R3 the trainer routes by itself, with R3 it uses the
experts that the engine says it used; aligned, trainer and engine compute by the same kernels, and are to give the same
numbers in float32. Exit code 0: every row is there and within its bound.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.agreement.runs import MAX_DRIFT, MAX_RATIO, drift, ratio_of_runs, read_differences  # noqa: E402

FLOAT32_BOUND = 1e-5
_R3 = "use_rollout_routing_replay"
ROWS: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "dense": ("qwen3", {}),
    "dense, aligned": ("qwen3", {"aligned": True}),
    "experts, without R3": ("qwen3_moe", {}),
    "experts, with R3": ("qwen3_moe", {_R3: True}),
    "dense and shared experts, with R3": ("glm4_moe", {_R3: True}),
}
"""Row -> family of the model, and settings of the run."""
_SAMPLES, _NEW_TOKENS = 2, 24
"""Of each prompt, at most: on a CPU engines that say which experts they used make some tens of tokens a second."""


@dataclass(frozen=True)
class Row:
    """What was measured of a model; mean absolute differences in nats."""

    name: str
    dtype: str
    num_tokens: int
    num_routed: int
    """Tokens whose experts were replayed; 0 without R3."""
    trainer_engine: float
    hf_engine: float
    hf_trainer: float
    rounding: float
    """Of HF in the run's dtype to the wider one."""
    bound: float
    is_exact: bool = False
    """Trainer and engine have to give the same numbers."""

    @property
    def is_within(self) -> bool:
        """Whether trainer and engine, and HF and each, are at most the bound apart."""
        close = all(x <= self.bound for x in (self.trainer_engine, self.hf_engine, self.hf_trainer))
        return close and not (self.is_exact and self.trainer_engine > 0)


def make_models(folders: Mapping[str, Path], dtype: str) -> None:
    """A random model for each row. Before threads start: transformers cannot be imported by several at once."""
    from vime.agreement.own_rollouts import own_prompts
    from vime.cli.init_model import init_model
    from vime.cli.tiny_model import TinyModel

    for name, folder in folders.items():
        init_model(folder, TinyModel(vocab="bytes", family=ROWS[name][0], dtype=dtype))
        own_prompts(folder)


def sampled(name: str, platform: Any, folder: Path) -> list[Any]:
    """Start an engine for a row's model, and let it sample."""
    from vime.agreement.compare import sample_own
    from vime.agreement.engine import engine_starter

    config = _config(name, platform)
    with engine_starter(config, platform)(folder) as engine:
        return sample_own(engine, folder, config, samples_per_prompt=_SAMPLES, max_new_tokens=_NEW_TOKENS)


def measure(name: str, samples: Sequence[Any], platform: Any, folder: Path, dtype: str) -> Row:
    """Score the samples by everybody.

    Raises: RuntimeError if the engine has not said which experts it used, where they are to be replayed.
    """
    from vime.agreement.analysis import Means
    from vime.agreement.compare import analyse_samples
    from vime.agreement.comparison import ENGINE, TRAINER
    from vime.agreement.explain import precision_bound

    num_routed = sum(sample.num_routed for sample in samples)
    settings = ROWS[name][1]
    if settings.get(_R3) and num_routed != (wanted := sum(len(sample.tokens) - 1 for sample in samples)):
        raise RuntimeError(f"{name}: the engine said of {num_routed} of {wanted} tokens which experts it used")
    means = Means(config=_config(name, platform), platform=platform, num_inside=0)
    comparison = analyse_samples(samples, folder, means, max_samples=None, origin=name).comparison
    narrow, wide = [who for who in comparison.scores if who.startswith("HF")]
    rounding = comparison.difference(narrow, wide).mean
    return Row(
        name=name,
        dtype=dtype,
        num_tokens=len(comparison.tokens.place),
        num_routed=num_routed,
        trainer_engine=comparison.difference(TRAINER, ENGINE).mean,
        hf_engine=comparison.difference(wide, ENGINE).mean,
        hf_trainer=comparison.difference(wide, TRAINER).mean,
        rounding=rounding,
        bound=FLOAT32_BOUND if dtype == "float32" else precision_bound(rounding, dtype),
        is_exact=settings.get("aligned", False) and dtype == "float32",
    )


def _config(name: str, platform: Any) -> Any:
    from vime.config import Config, RolloutConfig, TrainConfig

    # A share of a device's memory would make a cache of millions of blocks, and engines measure it while others start.
    cache = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
    return Config(
        rollout=RolloutConfig(rollout_max_context_len=128),
        train=TrainConfig(**ROWS[name][1]),
        vllm=cache if platform.device_type == "cuda" else {},
    )


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| model | dtype | tokens | replayed | trainer - engine | HF - engine | HF - trainer | HF rounds | bound | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        figures = (r.trainer_engine, r.hf_engine, r.hf_trainer, r.rounding, r.bound)
        verdict = "within" if r.is_within else "ABOVE"
        lines.append(
            f"| {r.name} | {r.dtype} | {r.num_tokens} | {r.num_routed} | "
            + " | ".join(f"{f:.1e}" for f in figures)
            + f" | {verdict} |"
        )
    return "\n".join(lines)


def models(device: str, out: Path | None, at_a_time: int) -> int:
    """Every row. Returns: 0 if all are there and within their bounds.

    Args: at_a_time: engines that start and sample side by side, while samples of those before are scored.
    """
    from vime.platform import get_platform

    platform, dtype = get_platform(device), "float32" if device == "cpu" else "bfloat16"
    rows: dict[str, Row] = {}
    scratch = Path(tempfile.mkdtemp(prefix="vime_agreement_"))
    folders = {name: scratch / str(number) for number, name in enumerate(ROWS)}
    begin = time.monotonic()
    try:
        make_models(folders, dtype)
        with ThreadPoolExecutor(at_a_time) as pool:
            # Those with R3 take longest on a CPU, so they are the first to start.
            waiting = {
                pool.submit(sampled, name, platform, folders[name]): name
                for name in sorted(ROWS, key=lambda name: _R3 not in ROWS[name][1])
            }
            for done in as_completed(waiting):
                name = waiting[done]
                try:
                    rows[name] = measure(name, done.result(), platform, folders[name], dtype)
                except Exception:  # the other rows are worth having
                    print(f"agreement: {name} failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                    continue
                took = time.monotonic() - begin
                print(f"agreement: {name}: trainer - engine {rows[name].trainer_engine:.2e}, {took:.0f} s", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    found = [rows[name] for name in ROWS if name in rows]
    print(table(found))
    if out is not None:
        out.write_text(json.dumps([vars(row) for row in found], indent=2) + "\n", encoding="utf-8")
    return 0 if list(ROWS) == [row.name for row in found] and all(row.is_within for row in found) else 1


def runs(drifting: Sequence[Path], without: Sequence[Path], with_r3: Sequence[Path], dense: Sequence[Path]) -> int:
    """Judge finished runs. Returns: 0 if none drifts, and R3 lowers the difference where both are given."""
    fine = True
    values = {run: read_differences(run) for run in dict.fromkeys([*drifting, *without, *with_r3, *dense])}
    for run, series in values.items():
        found = drift(series)
        judged = run in drifting
        fine &= found.is_small or not judged
        bound = f", at most {MAX_DRIFT * found.mean:.1e} wanted" if judged else ""
        print(
            f"{run}: {len(series)} steps, mean {found.mean:.3e}, rise over the run {found.rise:+.1e} "
            f"± {2 * found.error:.1e}{bound}"
        )
    if with_r3:
        r = ratio_of_runs([values[run] for run in with_r3], [values[run] for run in without])
        fine &= r.is_lower
        print(f"with R3 / without: {r.value:.3f} (95 %: {r.low:.3f} to {r.high:.3f}); at most {MAX_RATIO} wanted")
    if with_r3 and dense:
        means = [statistics.fmean(statistics.fmean(values[run]) for run in those) for those in (with_r3, dense)]
        print(f"with R3 / dense: {means[0] / means[1]:.3f}; 1.2 is aimed at")
    return 0 if fine else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny models in float32")
    parser.add_argument("--cuda", action="store_true", help="tiny models in bf16")
    parser.add_argument("--drift", type=Path, nargs="+", default=[], help="folders of runs that must not drift")
    parser.add_argument("--without", type=Path, nargs="+", default=[], help="folders of runs without R3")
    parser.add_argument("--with", dest="with_r3", type=Path, nargs="+", default=[], help="with R3, in that order")
    parser.add_argument("--dense", type=Path, nargs="+", default=[], help="runs of a dense model, to put beside --with")
    parser.add_argument("--out", type=Path, help="JSON file of the rows")
    parser.add_argument("--at-a-time", type=int, default=2, help="engines side by side (default: %(default)s)")
    given = parser.parse_args(argv)
    if given.at_a_time < 1:
        parser.error(f"--at-a-time is {given.at_a_time}; give 1 or more")
    if given.cpu + given.cuda + bool(given.drift or given.without or given.with_r3 or given.dense) != 1:
        parser.error("give one of --cpu, --cuda, and folders of runs")
    if len(given.without) != len(given.with_r3):
        parser.error(f"{len(given.without)} runs without R3 and {len(given.with_r3)} with; one of each seed is needed")
    if given.cpu or given.cuda:
        return models("cpu" if given.cpu else "cuda", given.out, given.at_a_time)
    return runs(given.drift, given.without, given.with_r3, given.dense)


if __name__ == "__main__":
    sys.exit(main())
