"""A group as bytes, for the journal: exact, a fraction of JSON's size, and quick to make.

One JSON header, then the numbers of all samples one after another. What siblings share (the prompt, its tokens, the
label, the row's metadata) is written once.
"""

from __future__ import annotations

import json
import struct
from array import array
from typing import Any

import numpy as np

from vime.types import Group, Sample, SampleStatus, SamplingSupport, VersionSpan

_SHARED = ("prompt", "label", "metadata")
_OWN = ("response", "reward", "teacher_log_probs", "remove_sample", "sample_id", "trajectory_id", "trace")


def group_to_bytes(group: Group) -> bytes:
    """What `group_from_bytes` turns into an equal group.

    Raises: TypeError, ValueError if a hook put something into a sample that JSON cannot hold.
    """
    first = group.samples[0]
    prompt = first.prompt_tokens
    shares_prompt = all(sample.prompt_tokens == prompt for sample in group.samples)
    shared = [name for name in _SHARED if all(getattr(s, name) == getattr(first, name) for s in group.samples)]
    numbers = [array("i", prompt).tobytes()] if shares_prompt else []
    rows = []
    for sample in group.samples:
        row = {name: getattr(sample, name) for name in (*_OWN, *_SHARED) if name not in shared}
        row["status"] = sample.status.value
        row["versions"] = [[span.version, span.start, span.end] for span in sample.weight_versions]
        row["length"] = sample.response_length
        row["supervised"] = sample.supervised
        if not shares_prompt:
            row["prompt_length"] = len(sample.prompt_tokens)
            numbers.append(array("i", sample.prompt_tokens).tobytes())
        numbers.append(array("i", sample.response_tokens).tobytes())
        numbers.append(array("d", sample.rollout_log_probs).tobytes())
        numbers.append(bytes(sample.loss_mask))
        if (routed := sample.routed_experts) is not None:
            row["routed"] = [routed.dtype.str, list(routed.shape)]
            numbers.append(np.ascontiguousarray(routed).tobytes())
        if sample.support is not None:
            row["support"] = [len(sample.support.starts), len(sample.support.ids)]
            numbers += [sample.support.starts.tobytes(), sample.support.ids.tobytes()]
        rows.append(row)
    header: dict[str, Any] = {
        "group_id": group.group_id,
        "place": group.place,
        "shared": {name: getattr(first, name) for name in shared},
        "samples": rows,
    }
    if shares_prompt:
        header["prompt_length"] = len(prompt)
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(text)), text, *numbers])


def group_from_bytes(data: bytes) -> Group:
    """The inverse of `group_to_bytes`. Raises: KeyError, TypeError, ValueError on damaged bytes."""
    if len(data) < 4:
        raise ValueError(f"{len(data)} bytes hold no group")
    (size,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + size])
    take = _Reader(data, 4 + size)
    common = take.array("i", header["prompt_length"]) if "prompt_length" in header else None
    samples = []
    for row in header["samples"]:
        prompt = common if common is not None else take.array("i", row["prompt_length"])
        length = row["length"]
        response, log_probs = take.array("i", length), take.array("d", length)
        mask = take.bytes(length)
        routed = None
        if "routed" in row:
            kind, shape = np.dtype(row["routed"][0]), row["routed"][1]
            routed = np.frombuffer(take.bytes(kind.itemsize * int(np.prod(shape))), kind).reshape(shape)
        support = None
        if "support" in row:
            starts, ids = (take.bytes(n * size) for n, size in zip(row["support"], (8, 4), strict=True))
            support = SamplingSupport(np.frombuffer(ids, np.int32), np.frombuffer(starts, np.int64))
        samples.append(
            Sample(
                **{name: header["shared"][name] if name in header["shared"] else row[name] for name in _SHARED},
                **{name: row[name] for name in _OWN},
                tokens=tuple(prompt) + tuple(response),
                response_length=length,
                loss_mask=tuple(mask),
                rollout_log_probs=tuple(log_probs),
                supervised=row["supervised"],
                support=support,
                routed_experts=routed,
                weight_versions=tuple(VersionSpan(*span) for span in row["versions"]),
                status=SampleStatus(row["status"]),
                group_id=header["group_id"],
            )
        )
    if len({id(sample.metadata) for sample in samples}) < len(samples):
        for sample in samples[1:]:
            sample.metadata = json.loads(json.dumps(sample.metadata))  # siblings must not write into each other's
    place = header["place"]
    return Group(header["group_id"], samples, place=None if place is None else (place[0], place[1]))


class _Reader:
    """Takes bytes from the front."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data, self._offset = data, offset

    def bytes(self, size: int) -> bytes:
        """The next ones. Raises: ValueError if there are fewer."""
        if self._offset + size > len(self._data):
            raise ValueError(f"{len(self._data)} bytes end before byte {self._offset + size}")
        found = self._data[self._offset : self._offset + size]
        self._offset += size
        return found

    def array(self, kind: str, length: int) -> array[Any]:
        """The next numbers."""
        numbers: array[Any] = array(kind)
        numbers.frombytes(self.bytes(numbers.itemsize * length))
        return numbers
