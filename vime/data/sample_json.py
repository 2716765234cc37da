"""Groups and samples as JSON, whole: for the state of a data source."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.errors import DataError
from vime.types import Group, Sample, SampleStatus, SamplingSupport, VersionSpan


def group_to_json(group: Group) -> dict[str, Any]:
    """A JSON-ready dict that `group_from_json` turns into an equal group. Raises: DataError."""
    samples = [sample_to_json(sample) for sample in group.samples]
    return {"group_id": group.group_id, "place": group.place, "samples": samples}


def group_from_json(data: Mapping[str, Any]) -> Group:
    """The inverse of `group_to_json`. Raises: KeyError, TypeError, ValueError on a damaged dict."""
    samples, place = [sample_from_json(sample) for sample in data["samples"]], data.get("place")  # older: none
    return Group(data["group_id"], samples, place=None if place is None else (place[0], place[1]))


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A JSON-ready dict that `sample_from_json` turns into an equal sample. Raises: DataError."""
    data = {f.name: getattr(sample, f.name) for f in fields(sample)}
    data["tokens"], data["loss_mask"] = list(sample.tokens), list(sample.loss_mask)
    # JSON has no NaN; a missing log-prob is null.
    data["rollout_log_probs"] = [None if math.isnan(lp) else lp for lp in sample.rollout_log_probs]
    data["weight_versions"] = [[span.version, span.start, span.end] for span in sample.weight_versions]
    data["status"] = sample.status.value
    if (routed := sample.routed_experts) is not None:
        data["routed_experts"] = {"dtype": routed.dtype.str, "shape": list(routed.shape), "base64": _packed(routed)}
    if sample.support is not None:
        data["support"] = {name: _packed(getattr(sample.support, name)) for name in ("ids", "starts")}
    try:
        json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"sample {sample.sample_id} cannot be saved: {error}; keep label, metadata, reward and trace JSON-ready"
        ) from error
    return data


def sample_from_json(data: Mapping[str, Any]) -> Sample:
    """The inverse of `sample_to_json`. Raises: KeyError, TypeError, ValueError on a damaged dict."""
    routed = data["routed_experts"]
    if routed is not None:
        routed = _unpacked(routed["base64"], np.dtype(routed["dtype"])).reshape(routed["shape"])
    support = data.get("support")  # older states have none
    if support is not None:
        support = SamplingSupport(_unpacked(support["ids"], np.int32), _unpacked(support["starts"], np.int64))
    return Sample(
        **{
            **data,
            "rollout_log_probs": [math.nan if lp is None else lp for lp in data["rollout_log_probs"]],
            "weight_versions": tuple(VersionSpan(*span) for span in data["weight_versions"]),
            "status": SampleStatus(data["status"]),
            "routed_experts": routed,
            "support": support,
        }
    )


def _packed(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _unpacked(text: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
