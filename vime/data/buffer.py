"""The data buffer: hands out groups of pending samples, takes unfinished ones back, and resumes exactly."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.data.prompts import Prompt, PromptSet
from vime.errors import DataError
from vime.types import Group, Sample, SampleStatus, VersionSpan

_FORMAT = 1  # of the state; a reader of another one refuses it


class DataBuffer:
    """A `DataSource` over a set of prompts.

    Every prompt is handed out once an epoch, in file order or in a seeded shuffle that is new each epoch. Groups that
    were put back are handed out before new ones, first in, first out.

    Args:
        prompts: what `load_prompts` gives, or any sequence of `Prompt`.
        n_samples_per_prompt: samples per group.
        shuffle: shuffle anew each epoch.
        seed: of the shuffle, not negative.
    """

    def __init__(self, prompts: Sequence[Prompt], *, n_samples_per_prompt: int, shuffle: bool, seed: int) -> None:
        if not len(prompts):
            raise DataError("the data buffer needs at least one prompt")
        if n_samples_per_prompt < 1:
            raise ValueError(f"n_samples_per_prompt is {n_samples_per_prompt}; a group has at least one sample")
        if seed < 0:
            raise ValueError(f"the shuffle's seed is {seed}; it may not be negative")
        self._prompts = prompts
        self._n_samples = n_samples_per_prompt
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._offset = 0  # prompts of this epoch already handed out
        self._next_group_id = 0
        self._next_sample_id = 0
        self._put_back: deque[Group] = deque()
        self._order = self._epoch_order()
        self._fingerprint: str | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        """What it hands out, in file order."""
        return self._prompts

    @property
    def epoch(self) -> int:
        """Epochs fully handed out."""
        return self._epoch

    @property
    def num_put_back(self) -> int:
        """Groups waiting to be handed out again."""
        return len(self._put_back)

    def epoch_size(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    def get_groups(self, n: int) -> list[Group]:
        """n groups of samples with their prompt tokens; those put back come first, then new ones in epoch order."""
        groups = [self._put_back.popleft() for _ in range(min(n, len(self._put_back)))]
        while len(groups) < n:
            groups.append(self._new_group())
        return groups

    def put_back(self, groups: Sequence[Group]) -> None:
        """Hand these out again, before new ones and in this order.

        Raises: ValueError for a group that this buffer never handed out, or holds already. Nothing is taken then.
        """
        held = {group.group_id for group in self._put_back}
        for group in groups:
            if group.group_id in held:
                raise ValueError(f"group {group.group_id} is put back twice")
            if not 0 <= group.group_id < self._next_group_id:
                raise ValueError(f"group {group.group_id} did not come from this buffer")
            held.add(group.group_id)
        self._put_back.extend(groups)

    def state(self) -> dict[str, Any]:
        """JSON-ready: the cursor, the counters, and the groups put back with all their tokens.

        Raises: DataError if a hook put something into a sample that JSON cannot hold.
        """
        return {
            "format": _FORMAT,
            "data": self._data_fingerprint(),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "offset": self._offset,
            "next_group_id": self._next_group_id,
            "next_sample_id": self._next_sample_id,
            "put_back": [
                {"group_id": g.group_id, "samples": [sample_to_json(s) for s in g.samples]} for g in self._put_back
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken. Raises: DataError if it is of other data, seed or order."""
        if state.get("format") != _FORMAT:
            raise DataError(f"the data buffer's state has format {state.get('format')!r}; this version reads {_FORMAT}")
        ours: dict[str, tuple[Any, str]] = {
            "data": (self._data_fingerprint(), "the prompts (--prompt-data, its keys, chat template or limits) differ"),
            "seed": (self._seed, "--rollout-seed differs"),
            "shuffle": (self._shuffle, "--rollout-shuffle differs"),
        }
        for key, (value, meaning) in ours.items():
            if state.get(key) != value:
                raise DataError(
                    f"the saved data buffer does not belong to this run: {meaning} (saved {state.get(key)!r}, now "
                    f"{value!r}); resume with the settings it was saved with"
                )
        try:
            put_back = [Group(g["group_id"], [sample_from_json(s) for s in g["samples"]]) for g in state["put_back"]]
            cursor = {key: int(state[key]) for key in ("epoch", "offset", "next_group_id", "next_sample_id")}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the saved data buffer is damaged: {error!r}") from error
        if not 0 <= cursor["offset"] < len(self._prompts) or min(cursor.values()) < 0:
            raise DataError(f"the saved data buffer is damaged: {cursor} with {len(self._prompts)} prompts")
        self._epoch, self._offset = cursor["epoch"], cursor["offset"]
        self._next_group_id, self._next_sample_id = cursor["next_group_id"], cursor["next_sample_id"]
        self._put_back = deque(put_back)
        self._order = self._epoch_order()

    def _new_group(self) -> Group:
        prompt = self._prompts[int(self._order[self._offset]) if self._order is not None else self._offset]
        group_id = self._next_group_id
        first = self._next_sample_id
        samples = [
            Sample(
                prompt=prompt.prompt,
                tokens=prompt.tokens,
                label=prompt.label,
                metadata=_own(prompt.metadata),
                group_id=group_id,
                sample_id=first + i,
                trajectory_id=first + i,
            )
            for i in range(self._n_samples)
        ]
        self._next_group_id += 1
        self._next_sample_id += self._n_samples
        self._offset += 1
        if self._offset == len(self._prompts):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._epoch_order()
        return Group(group_id, samples)

    def _epoch_order(self) -> npt.NDArray[np.int64] | None:
        if not self._shuffle:
            return None
        # RandomState over a seeded MT19937 is the one numpy stream that is promised never to change: a resumed run
        # under a newer numpy must not see another order.
        bits = np.random.MT19937(np.random.SeedSequence([self._seed, self._epoch]))
        return np.random.RandomState(bits).permutation(len(self._prompts)).astype(np.int64)

    def _data_fingerprint(self) -> str:
        if self._fingerprint is None:
            prompts = self._prompts
            self._fingerprint = prompts.fingerprint() if isinstance(prompts, PromptSet) else _fingerprint(prompts)
        return self._fingerprint


def pending_again(group: Group) -> Group:
    """The same group before any generation: same ids, prompt, label and metadata of the file, no response."""
    return Group(
        group.group_id,
        [
            Sample(
                prompt=s.prompt,
                tokens=s.prompt_tokens,
                label=s.label,
                metadata={k: v for k, v in s.metadata.items() if k not in GENERATED_METADATA},
                group_id=s.group_id,
                sample_id=s.sample_id,
                trajectory_id=s.trajectory_id,
            )
            for s in group.samples
        ],
    )


GENERATED_METADATA = frozenset({"error", "reward_verdict"})  # what vime itself writes into metadata while generating


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A JSON-ready dict that `sample_from_json` turns into an equal sample. Raises: DataError."""
    data = {f.name: getattr(sample, f.name) for f in fields(sample)}
    data["tokens"], data["loss_mask"] = list(sample.tokens), list(sample.loss_mask)
    # JSON has no NaN; a missing log-prob is null.
    data["rollout_log_probs"] = [None if math.isnan(lp) else lp for lp in sample.rollout_log_probs]
    data["weight_versions"] = [[span.version, span.start, span.end] for span in sample.weight_versions]
    data["status"] = sample.status.value
    if (routed := sample.routed_experts) is not None:
        raw = base64.b64encode(np.ascontiguousarray(routed).tobytes()).decode()
        data["routed_experts"] = {"dtype": routed.dtype.str, "shape": list(routed.shape), "base64": raw}
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
        flat = np.frombuffer(base64.b64decode(routed["base64"]), np.dtype(routed["dtype"]))
        routed = flat.reshape(routed["shape"]).copy()
    return Sample(
        **{
            **data,
            "rollout_log_probs": [math.nan if lp is None else lp for lp in data["rollout_log_probs"]],
            "weight_versions": tuple(VersionSpan(*span) for span in data["weight_versions"]),
            "status": SampleStatus(data["status"]),
            "routed_experts": routed,
        }
    )


def _own(metadata: dict[str, Any]) -> dict[str, Any]:
    """A copy that a hook may write into, however deep, without touching the siblings."""
    return copy.deepcopy(metadata) if metadata else {}


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for p in prompts:
        digest.update(json.dumps([p.prompt, p.tokens, p.label, p.metadata], sort_keys=True, default=repr).encode())
    return digest.hexdigest()
