"""The data buffer: hands out groups of pending samples, takes unfinished ones back, and resumes exactly."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vime.config.hooks import UserFunction
from vime.data.order import PromptOrder
from vime.data.prompt_set import Prompt, PromptSet
from vime.data.sample_json import group_from_json, group_to_json
from vime.data.waiting import WaitingGroups
from vime.errors import DataError
from vime.protocols import DataSource, RolloutContext
from vime.types import Group, Metrics, Sample

_NONE = Prompt(prompt="", tokens=())  # where the rollout function makes its own prompts
_FORMAT = 2  # of the state; a reader of another one refuses it


class DataBuffer(DataSource):
    """A `DataSource` over a set of prompts.

    `vime.data.order.PromptOrder` says which prompt comes when. Groups that were put back are handed out before new
    ones: first in, first out, unless told otherwise.

    Args:
        prompts: what `tokenise_prompts` gives, or any sequence of `Prompt`; None: there are none, and the groups
            handed out hold samples without a prompt, for a rollout function that makes its own.
        n_samples_per_prompt: samples per group.
        shuffle: shuffle anew each epoch.
        seed: of the shuffle, not negative.
        weights: shares of the parts, in which they are mixed; None: one list.
        part_sizes: prompts of each part; default: the words of a `PromptSet`, or all in one.
        buffer_filter: (config, rollout_id, groups, n) -> at most n of the groups put back, to be handed out next.
        sort_by_staleness: of the groups put back, those whose oldest token is of the oldest policy come first.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt] | None,
        *,
        n_samples_per_prompt: int,
        shuffle: bool,
        seed: int,
        weights: Sequence[float] | None = None,
        part_sizes: Sequence[int] | None = None,
        buffer_filter: UserFunction | None = None,
        sort_by_staleness: bool = False,
    ) -> None:
        if prompts is not None and not len(prompts):
            raise DataError("the data buffer needs at least one prompt")
        if n_samples_per_prompt < 1:
            raise ValueError(f"n_samples_per_prompt is {n_samples_per_prompt}; a group has at least one sample")
        self._prompts = prompts
        self._n_samples = n_samples_per_prompt
        self._settings = {"seed": seed, "shuffle": shuffle, "weights": list(weights) if weights is not None else None}
        self._order: PromptOrder | None = None
        if prompts is not None:
            sizes = part_sizes or (prompts.part_sizes if isinstance(prompts, PromptSet) else [len(prompts)])
            self._order = PromptOrder(sizes, weights=weights, shuffle=shuffle, seed=seed)
        self._filter = buffer_filter
        self._context: RolloutContext | None = None
        self._rollout_id = -1
        self._next_group_id = 0
        self._next_sample_id = 0
        self._num_discarded = 0
        self._put_back = WaitingGroups(oldest_version) if sort_by_staleness else WaitingGroups()
        self._discarded: list[Group] = []
        self._fingerprints: dict[str, str] | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        """What it hands out, in file order."""
        return self._prompts if self._prompts is not None else ()

    def epoch_size(self) -> int | None:
        """Prompts in one epoch; None without prompts."""
        return self._order.epoch_size if self._order is not None else None

    def begin_rollout(self, config: RolloutContext, rollout_id: int) -> None:
        """What the buffer filter is called with."""
        self._context, self._rollout_id = config, rollout_id

    def get_groups(self, n: int) -> list[Group]:
        """n groups of samples with their prompt tokens; those put back come first, then new ones in epoch order."""
        groups = self._again(n)
        while len(groups) < n:
            groups.append(self._new_group())
        return groups

    def put_back(self, groups: Sequence[Group]) -> None:
        """Hand these out again, before new ones and in this order, with whatever responses they have.

        Raises: ValueError for a group that this buffer never handed out, or holds already. Nothing is taken then.
        """
        given: set[int] = set()
        for group in groups:
            if group.group_id in given or group.group_id in self._put_back:
                raise ValueError(f"group {group.group_id} is put back twice")
            if not 0 <= group.group_id < self._next_group_id:
                raise ValueError(f"group {group.group_id} did not come from this buffer")
            given.add(group.group_id)
        self._put_back.add(groups)

    @property
    def waiting(self) -> list[int]:
        """The group_id of each group that was put back."""
        return [group.group_id for group in self._put_back]

    def take_discarded(self) -> list[Group]:
        """The groups that the buffer filter has taken out for good since the last call."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def metrics(self) -> Metrics:
        """How far it is, and what waits in it."""
        found: Metrics = {
            "data/num_buffered_groups": len(self._put_back),
            "data/num_discarded_groups": self._num_discarded,
        }
        if self._order is not None:
            found["data/epoch"] = sum(self._order.drawn) / self._order.epoch_size
            found["data/num_prompts"] = self._order.epoch_size
        if isinstance(self._prompts, PromptSet):
            found["data/num_dropped_prompts"] = self._prompts.num_dropped
        return found

    def state(self) -> dict[str, Any]:
        """JSON-ready: the position, the counters, and the groups put back with all their tokens.

        Raises: DataError if a hook put something into a sample that JSON cannot hold.
        """
        return {
            "format": _FORMAT,
            "data": self._data_fingerprints(),
            **self._settings,
            "drawn": self._order.drawn if self._order is not None else [],
            "next_group_id": self._next_group_id,
            "next_sample_id": self._next_sample_id,
            "num_discarded": self._num_discarded,
            "put_back": [group_to_json(group) for group in self._put_back],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Whether `restore` would take this state. Raises: DataError if it is of other data, seed or order."""
        if state.get("format") != _FORMAT:
            raise DataError(f"the data buffer's state has format {state.get('format')!r}; this version reads {_FORMAT}")
        if differing := [*self._other_data(state.get("data")), *self._other_settings(state)]:
            raise DataError(
                "the saved data buffer does not belong to this run, so the next prompts would be others: "
                + "; ".join(differing)
                + ". Resume with the data and settings it was saved with; to go on with others, take the checkpoint's "
                "weights alone by --finetune, with another --save"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken. Raises: DataError as `check_state`, or if it is damaged."""
        self.check_state(state)
        try:
            put_back = [group_from_json(group) for group in state["put_back"]]
            counters = [int(state[key]) for key in ("next_group_id", "next_sample_id", "num_discarded")]
            if min(counters) < 0:
                raise ValueError(f"negative counters {counters}")
            if self._order is not None:
                self._order.move_to([int(count) for count in state["drawn"]])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the saved data buffer is damaged: {error!r}") from error
        self._next_group_id, self._next_sample_id, self._num_discarded = counters
        self._put_back.replace(put_back)

    def forget_responses(self) -> None:
        """What waits to be handed out again is as before any generation."""
        self._put_back.replace([pending_again(one_sample_each(group)) for group in self._put_back])

    def _again(self, n: int) -> list[Group]:
        """At most n of the groups put back, which they leave."""
        if not self._put_back or n < 1:
            return []
        if self._filter is None:
            return self._put_back.take(n)
        if self._context is None:
            raise ValueError("a buffer filter needs begin_rollout before get_groups")
        waiting = list(self._put_back)
        left = list(waiting)
        chosen = self._call_filter(left, n)
        taken = {group.group_id for group in chosen}
        self._put_back.replace(group for group in left if group.group_id not in taken)
        stays = taken | {group.group_id for group in self._put_back}
        discarded = [group for group in waiting if group.group_id not in stays]
        self._num_discarded += len(discarded)
        self._discarded += discarded
        return chosen

    def _call_filter(self, groups: list[Group], n: int) -> list[Group]:
        """What the user's filter chose. It may take groups out of the list: those are discarded unless returned."""
        assert self._filter is not None and self._context is not None
        known = {id(group) for group in groups}
        chosen = self._filter(self._context, self._rollout_id, groups, n)
        if not isinstance(chosen, list) or not all(id(group) in known for group in chosen):
            raise self._filter.refuse(chosen, "a list of the buffer's groups")
        if len({id(group) for group in chosen}) < len(chosen) or len(chosen) > n:
            raise self._filter.broken(f"returned {len(chosen)} groups; at most {n} are wanted, each once")
        if not all(id(group) in known for group in groups):
            raise self._filter.broken("put groups into the buffer; it may only take some out")
        return chosen

    def _new_group(self) -> Group:
        place, prompt = None, _NONE
        if self._prompts is not None and self._order is not None:
            place = self._order.draw()
            prompt = self._prompts[place[1]]
        group = new_group(
            prompt,
            group_id=self._next_group_id,
            first_sample_id=self._next_sample_id,
            n_samples=self._n_samples,
        )
        group.place = place
        self._next_group_id += 1
        self._next_sample_id += self._n_samples
        return group

    def _other_data(self, saved: Any) -> Iterator[str]:
        """What differs in the prompts: each file by its name."""
        ours = self._data_fingerprints()
        if not isinstance(saved, Mapping):
            yield f"the state says {str(saved)[:100]} of its prompts"
            return
        if len(saved) != len(ours):
            yield f"--prompt-data had {len(saved)} parts, and has {len(ours)}"
            return
        for (old, digest), (new, now) in zip(saved.items(), ours.items(), strict=True):
            if digest != now:
                yield (
                    f"the prompts of {new} are not those of {old}: the file, the slice, the keys, the chat template, "
                    "the tokenizer or a length limit was changed"
                )

    def _other_settings(self, state: Mapping[str, Any]) -> Iterator[str]:
        flags = {"seed": "--rollout-seed", "shuffle": "--rollout-shuffle", "weights": "--prompt-data-weights"}
        for key, flag in flags.items():
            if state.get(key) != self._settings[key]:
                yield f"{flag} was {state.get(key)}, and is {self._settings[key]}"

    def _data_fingerprints(self) -> dict[str, str]:
        if self._fingerprints is None:
            prompts = self._prompts
            if isinstance(prompts, PromptSet):
                self._fingerprints = prompts.fingerprints()
            else:
                self._fingerprints = {"prompts": _fingerprint(prompts)} if prompts is not None else {}
        return self._fingerprints


def new_group(prompt: Prompt, *, group_id: int, first_sample_id: int, n_samples: int) -> Group:
    """A group of pending samples of one prompt, numbered from `first_sample_id`; for data sources of your own, too."""
    samples = [
        Sample(
            prompt=prompt.prompt,
            tokens=prompt.tokens,
            label=prompt.label,
            metadata=_own(prompt.metadata),
            group_id=group_id,
            sample_id=sample_id,
            trajectory_id=sample_id,
        )
        for sample_id in range(first_sample_id, first_sample_id + n_samples)
    ]
    return Group(group_id, samples)


def oldest_version(group: Group) -> float:
    """The policy version of a group's oldest token; infinity where nothing was generated."""
    return min((span.version for s in group.samples for span in s.weight_versions), default=math.inf)


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
        place=group.place,
    )


def one_sample_each(group: Group) -> Group:
    """A group with the first sample of each trajectory: a function may have made siblings in an earlier rollout."""
    firsts = {sample.trajectory_id: sample for sample in reversed(group.samples)}
    return replace(group, samples=[firsts[key] for key in dict.fromkeys(s.trajectory_id for s in group.samples)])


GENERATED_METADATA = frozenset({"error", "reward_verdict"})  # what vime itself writes into metadata while generating


def _own(metadata: dict[str, Any]) -> dict[str, Any]:
    """A copy that a hook may write into, however deep, without touching the siblings."""
    return copy.deepcopy(metadata) if metadata else {}


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for p in prompts:
        digest.update(json.dumps([p.prompt, p.tokens, p.label, p.metadata], sort_keys=True, default=repr).encode())
    return digest.hexdigest()
