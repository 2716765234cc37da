"""A rollout as a Parquet file: what pandas reads, and what restores every sample exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from vime.errors import DataError
from vime.types import Group, Sample, SampleStatus, SamplingSupport, VersionSpan

# Fields of a sample with a column type of their own.
_TYPED = frozenset(
    "prompt response label reward status supervised remove_sample tokens response_length loss_mask rollout_log_probs "
    "weight_versions support routed_experts group_id sample_id trajectory_id".split()
)

_MAX_DEPTH, _MAX_SHOWN = 20, 1000


def write_rollout(path: Path, rollout_id: int, groups: Sequence[Group], reward_key: str | None = None) -> None:
    """Write the samples of a rollout, one row each. `read_rollout` and `pandas.read_parquet` read it.

    Columns: rollout_id, group_id, sample_id, trajectory_id; prompt, response, label (text, or JSON where the column
    `json` of the row names it); reward (the number; of a dict the entry `reward_key`, null without
    one), rewards (the dict as JSON); status; supervised; remove_sample;
    tokens, response_length, loss_mask, rollout_log_probs (NaN where nobody sampled; float32 if that holds them all
    exactly, else float64); weight_versions (version, start, end); support (the ids that could have been sampled in each
    response token's place, none where all could); routed_experts (dtype, shape, bytes); metadata, trace and any further
    field as JSON. Objects that JSON does not know are written as their repr, and come back as that text.
    """
    import pyarrow.parquet as pq

    samples = [s for g in groups for s in g.samples]
    # A page of a file has less than 2 GiB, and routed experts and supports take megabytes a sample: few rows at a time.
    many = any(s.routed_experts is not None or s.support is not None for s in samples)
    sizes = {"row_group_size": 64, "write_batch_size": 8} if many else {}
    pq.write_table(_table(rollout_id, samples, reward_key), path, compression="zstd", **sizes)


def read_rollout(path: Path | str) -> list[Group]:
    """The groups of a file that `write_rollout` wrote, in their order, each sample as it was.

    Raises: DataError if the file cannot be read, or is not of this kind.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
        samples = [_sample(row) for row in rows]
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as a rollout: {type(error).__name__}: {error}; give a Parquet file of a run's "
            "rollouts/ folder or of --save-debug-rollout-data"
        ) from error
    return [Group(group_id, list(members)) for group_id, members in groupby(samples, lambda s: s.group_id)]


def _table(rollout_id: int, samples: Sequence[Sample], reward_key: str | None) -> Any:
    import pyarrow as pa

    span = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
    experts = pa.struct([("dtype", pa.string()), ("shape", pa.list_(pa.int32())), ("data", pa.large_binary())])
    texts = [_texts({"prompt": s.prompt, "response": s.response, "label": s.label}) for s in samples]
    log_prob = pa.float32() if _fits_float32(samples) else pa.float64()

    def column(kind: Any, get: Callable[[Sample], Any]) -> Any:
        return pa.array([get(s) for s in samples], kind)

    return pa.table(
        {
            "rollout_id": column(pa.int64(), lambda s: rollout_id),
            "group_id": column(pa.int64(), lambda s: s.group_id),
            "sample_id": column(pa.int64(), lambda s: s.sample_id),
            "trajectory_id": column(pa.int64(), lambda s: s.trajectory_id),
            **{
                name: pa.array([written[name] for written, _ in texts], pa.string())
                for name in ("prompt", "response", "label")
            },
            "json": pa.array([names for _, names in texts], pa.list_(pa.string())),
            "reward": column(pa.float64(), lambda s: _number(s.reward, reward_key)),
            "rewards": column(pa.string(), lambda s: _json(s.reward) if isinstance(s.reward, dict) else None),
            "status": column(pa.string(), lambda s: str(s.status)),
            "supervised": column(pa.bool_(), lambda s: s.supervised),
            "remove_sample": column(pa.bool_(), lambda s: s.remove_sample),
            "tokens": column(pa.list_(pa.int32()), lambda s: s.tokens),
            "response_length": column(pa.int32(), lambda s: s.response_length),
            "loss_mask": column(pa.list_(pa.uint8()), lambda s: s.loss_mask),
            "rollout_log_probs": column(pa.list_(log_prob), lambda s: s.rollout_log_probs),
            "weight_versions": column(
                pa.list_(span),
                lambda s: [{"version": v.version, "start": v.start, "end": v.end} for v in s.weight_versions],
            ),
            "support": column(
                pa.list_(pa.list_(pa.int32())), lambda s: None if s.support is None else s.support.rows()
            ),
            "routed_experts": column(experts, _experts),
            **{name: pa.array([_json(getattr(s, name)) for s in samples], pa.string()) for name in _plain_fields()},
        }
    )


def _number(reward: float | dict[str, float] | None, key: str | None) -> float | None:
    return reward if not isinstance(reward, dict) else None if key is None else reward.get(key)


def _plain_fields() -> list[str]:
    """Fields of a sample that are written as JSON in a column of their own."""
    return [f.name for f in fields(Sample) if f.name not in _TYPED]


def _texts(values: Mapping[str, Any]) -> tuple[dict[str, str | None], list[str]]:
    """Each value as text, and the names of those that are JSON: whatever is no text that UTF-8 can hold."""
    written = {
        name: value if value is None or (isinstance(value, str) and _is_utf8(value)) else _json(value)
        for name, value in values.items()
    }
    return written, [name for name, value in values.items() if written[name] is not value]


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    except (
        TypeError,
        ValueError,
        RecursionError,
    ):  # a key that is no text, an object within itself, an endless integer
        value = _tamed(value)
        text = json.dumps(value, ensure_ascii=False)
    # A response may end inside a character; a lone surrogate would make the whole file unwritable.
    return text if _is_utf8(text) else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return repr(value)


def _tamed(value: Any, depth: int = 0) -> Any:
    """What json.dumps refuses, as something that it takes: odd keys and what lies too deep as their repr."""
    if depth < _MAX_DEPTH and isinstance(value, dict):
        return {key if isinstance(key, str) else _shown(key): _tamed(entry, depth + 1) for key, entry in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [_tamed(entry, depth + 1) for entry in value]
    if value is None or isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return _shown(value)


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_MAX_SHOWN]
    except (ValueError, RecursionError):  # integers of more than 4300 digits have no repr
        return f"<{type(value).__name__}>"


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _fits_float32(samples: Sequence[Sample]) -> bool:
    """Whether no log-prob loses anything in float32; engines compute in it, users' functions need not."""
    values = np.fromiter((value for s in samples for value in s.rollout_log_probs), np.float64)
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float32), values, equal_nan=True))


def _experts(sample: Sample) -> dict[str, Any] | None:
    routed = sample.routed_experts
    if routed is None:
        return None
    return {"dtype": routed.dtype.str, "shape": list(routed.shape), "data": np.ascontiguousarray(routed).tobytes()}


def _sample(row: Mapping[str, Any]) -> Sample:
    is_json = set(row["json"])
    texts = {name: json.loads(row[name]) if name in is_json else row[name] for name in ("prompt", "response", "label")}
    routed = row["routed_experts"]
    if routed is not None:
        routed = np.frombuffer(routed["data"], np.dtype(routed["dtype"])).reshape(routed["shape"]).copy()
    return Sample(
        **texts,
        reward=row["reward"] if row["rewards"] is None else json.loads(row["rewards"]),
        status=SampleStatus(row["status"]),
        supervised=row["supervised"],
        remove_sample=row["remove_sample"] in (True, "true"),  # older files have JSON
        tokens=row["tokens"],
        response_length=row["response_length"],
        loss_mask=row["loss_mask"],
        rollout_log_probs=row["rollout_log_probs"],
        weight_versions=tuple(VersionSpan(v["version"], v["start"], v["end"]) for v in row["weight_versions"]),
        support=None if row.get("support") is None else SamplingSupport.of(row["support"]),
        routed_experts=routed,
        group_id=row["group_id"],
        sample_id=row["sample_id"],
        trajectory_id=row["trajectory_id"],
        **{name: json.loads(row[name]) for name in _plain_fields() if name in row},
    )
