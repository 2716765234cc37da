"""The run's data source with its journal: knows which groups are out, and goes on after a kill with what was finished.

Works with any data source. What a checkpoint keeps is the source's own state, and beside it the groups that were out:
taken, but neither trained on, dropped nor put back. A resume hands those out first, in their order. Where the journal
has kept the responses of a group, and no version of the policy that was lost sampled them, it is handed out with them.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vime.data.buffer import DataBuffer, one_sample_each, pending_again
from vime.data.journal import Journal
from vime.data.sample_json import sample_from_json, sample_to_json
from vime.data.source import take_groups
from vime.errors import DataError
from vime.protocols import DataSource, RolloutContext
from vime.types import Group, Metrics, PolicyVersion, SampleStatus

KEY = "vime_journal"
"""Of a checkpoint's data source: the journal's id and event, and the groups that were out."""


class JournaledSource(DataSource):
    """A `DataSource` around the run's own; calls may come from several threads.

    Args:
        source: what hands out groups. Whatever else it can do, this can, too.
        journal: of the run.
        version: of the weights that the run begins with.
        uses_finished: the run's rollout function takes finished groups from get_groups, and trains on them as they are.
        why_not: why nothing that was kept may be used again, where that is so.
    """

    def __init__(
        self,
        source: DataSource,
        journal: Journal,
        *,
        version: PolicyVersion,
        uses_finished: bool,
        why_not: str | None = None,
    ) -> None:
        self.source, self.journal = source, journal
        self._version, self._uses_finished = version, uses_finished
        self._why_not = why_not
        self._lock = threading.RLock()
        self._out: dict[int, _Out] = {}
        self._again: deque[Group] = deque()  # handed out before what the source has
        self._kept: set[int] = set()
        self._rollout_id = -1
        self.resumed: str | None = None
        """What a resume found, in words."""

    # A data source ----------------------------------------------------------------------------------------------------

    def get_groups(self, n: int) -> list[Group]:
        """See `DataSource`; after a resume, groups that were out before come first. Raises: DataError."""
        with self._lock:
            groups = [self._again.popleft() for _ in range(min(n, len(self._again)))]
            if len(groups) < n:
                groups += take_groups(self.source, n - len(groups))
            self._note_discarded()
            for group in groups:
                self._out[group.group_id] = _Out(group)
            self.journal.taken(groups, self._rollout_id)
            return [self._with_responses(group) for group in groups]

    def put_back(self, groups: Sequence[Group]) -> None:
        """See `DataSource`. One that was handed out finished stays so."""
        with self._lock:
            self.source.put_back([group for group in groups if not group.is_finished])
            finished = [group.group_id for group in groups if group.is_finished and group.group_id in self._out]
            self._again.extendleft(self._out[group_id].group() for group_id in reversed(finished))
            self._kept.update(finished)
            self.journal.put_back(groups)
            self._gone(groups)

    def finished(self, group: Group) -> None:
        """See `DataSource`."""
        with self._lock:
            if group.group_id in self._out:
                self.journal.finished(group, keep=self._uses_finished)

    def dropped(self, groups: Sequence[Group], reason: str) -> None:
        """See `DataSource`."""
        with self._lock:
            self.journal.dropped([group for group in groups if group.group_id in self._out], reason)
            self._gone(groups)

    def epoch_size(self) -> int | None:
        """See `DataSource`."""
        return self.source.epoch_size()

    def begin_rollout(self, config: RolloutContext, rollout_id: int) -> None:
        """See `DataSource`."""
        with self._lock:
            self._rollout_id = rollout_id
            self.source.begin_rollout(config, rollout_id)

    def metrics(self) -> Metrics:
        """See `DataSource`."""
        with self._lock:
            return self.source.metrics()

    def state(self) -> dict[str, Any]:
        """The source's own, and the groups that are out; the journal is on the disk up to here.

        Raises: DataError if JSON cannot hold what a group was handed out with.
        """
        with self._lock:
            inner: Any = self.source.state()
            if not isinstance(inner, dict):
                return inner  # type: ignore[no-any-return]  # refused by who asks, who names the source
            out = [held.to_json() for held in (*map(_Out, self._again), *self._out.values())]
            return {**inner, KEY: {"id": self.journal.id, "event": self.journal.sync(), "out": out}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `DataSource`. The journal forgets what came after the state."""
        mine = state.get(KEY)
        with self._lock:
            self.source.restore({name: value for name, value in state.items() if name != KEY})
            try:
                saved = mine if mine is not None else {"id": None, "event": 0, "out": []}
                self._again = deque(_Out.from_json(held).group() for held in saved["out"])
                event = int(saved["event"]) if saved["id"] == self.journal.id else 0
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"the groups under way that were saved are damaged: {error!r}") from error
            self._rewind(event)

    def begin_anew(self) -> None:
        """The run begins from the start, but its journal is of one that was killed before its first checkpoint."""
        with self._lock:
            self._rewind(0)

    # What the loops report --------------------------------------------------------------------------------------------

    def trained(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """The trainer has learnt from these groups, in this rollout's step."""
        with self._lock:
            self.journal.trained(rollout_id, [group for group in groups if group.group_id in self._out])
            self._gone(groups)

    def saved(self, rollout_id: int, version: PolicyVersion, state: Mapping[str, Any]) -> None:
        """A checkpoint is complete. Args: version: of its weights. state: what it keeps of this source."""
        self.journal.saved(rollout_id, version, state[KEY]["event"])

    def __getattr__(self, name: str) -> Any:
        """What else a source of the user's can do, for rollout functions that know it."""
        if name in ("source", "_lock"):
            raise AttributeError(name)  # not made yet, as while it is copied
        return getattr(self.source, name)

    # ------------------------------------------------------------------------------------------------------------------

    def _gone(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._out.pop(group.group_id, None)

    def _note_discarded(self) -> None:
        if isinstance(self.source, DataBuffer) and (discarded := self.source.take_discarded()):
            self.journal.dropped(discarded, "buffer_filter")

    def _rewind(self, event: int) -> None:
        known = isinstance(self.source, DataBuffer)
        if self._why_not is not None:
            # What the checkpoint has of responses is of no more use than what the journal has.
            self._again = deque(pending_again(one_sample_each(group)) for group in self._again)
        waiting = [group.group_id for group in self._again]
        if isinstance(self.source, DataBuffer):
            if self._why_not is not None:
                self.source.forget_responses()
            waiting += self.source.waiting
        found = self.journal.rewind(
            event, waiting=waiting, unsure=not known, version=self._version, why_not=self._why_not
        )
        self._kept = set(found.partial) | (set(found.finished) if self._uses_finished else set())
        parts = [f"{found.num_waiting} groups were under way", f"{found.num_undone} begun since are begun again"]
        if self._kept:
            parts.append(f"the responses of {len(self._kept)} of them are used again")
        elif self._why_not is not None:
            parts.append(f"all are generated anew ({self._why_not})")
        if found.num_lost:
            parts.append(f"{found.num_lost} are lost")
        self.resumed = "; ".join(parts) if found.num_waiting or found.num_undone or found.num_lost else None
        self.journal.note(None, "resume", self.resumed or "nothing was under way")

    def _with_responses(self, group: Group) -> Group:
        """The group with what the journal has kept of it."""
        if group.group_id not in self._kept:
            return group
        self._kept.remove(group.group_id)
        try:
            kept = self.journal.kept(group.group_id)
        except (KeyError, TypeError, ValueError) as error:
            self.journal.note(group.group_id, "again", f"what was kept of it is damaged: {error!r}")
            return group
        if kept is None:
            return group
        found, is_finished = kept
        ours, theirs = group.samples[0], found.samples[0]
        if ours.prompt_tokens != theirs.prompt_tokens or ours.label != theirs.label:
            self.journal.note(group.group_id, "again", "what was kept of it is of another prompt")
            return group
        num_tokens = sum(sample.response_length for sample in found.samples)
        what = "finished" if is_finished else f"begun ({num_tokens} tokens)"
        self.journal.note(group.group_id, "reused", f"it was {what} before the run was resumed")
        return replace(found, place=group.place, is_finished=is_finished)


class _Out:
    """A group as it was handed out, whatever generation and users' functions make of its samples since."""

    def __init__(self, group: Group) -> None:
        first = group.samples[0]
        self._is_plain = not any(
            sample.status is not SampleStatus.PENDING
            or sample.tokens != first.tokens
            or sample.prompt != first.prompt
            or sample.label != first.label
            or sample.metadata != first.metadata
            for sample in group.samples
        )
        self._place = group.place
        self._group_id = group.group_id
        self._samples = [_own(sample) for sample in (group.samples[:1] if self._is_plain else group.samples)]
        self._ids = [(sample.sample_id, sample.trajectory_id) for sample in group.samples]

    def group(self) -> Group:
        """The group again."""
        samples = []
        for (sample_id, trajectory_id), kept in zip(self._ids, self._samples * len(self._ids), strict=False):
            sample = _own(kept)
            sample.sample_id, sample.trajectory_id = sample_id, trajectory_id
            samples.append(sample)
        return Group(self._group_id, samples, place=self._place)

    def to_json(self) -> dict[str, Any]:
        """For `from_json`. Raises: DataError for what JSON cannot hold."""
        samples = [sample_to_json(sample) for sample in self._samples]
        return {"group_id": self._group_id, "place": self._place, "samples": samples, "ids": self._ids}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> _Out:
        """The inverse. Raises: KeyError, TypeError, ValueError on damaged data."""
        place, samples = data["place"], [sample_from_json(sample) for sample in data["samples"]]
        made = cls(Group(data["group_id"], samples, place=None if place is None else (place[0], place[1])))
        made._ids = [(sample_id, trajectory_id) for sample_id, trajectory_id in data["ids"]]
        return made


def _own(sample: Any) -> Any:
    copied = copy.copy(sample)  # tokens and the like are shared: they are immutable
    copied.metadata, copied.trace = copy.deepcopy(sample.metadata), list(sample.trace)
    return copied
