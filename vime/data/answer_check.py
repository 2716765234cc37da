"""A look at every answer before training: is it learnable, would it be cut, what does the template leave out?"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vime.data.answers import Answer, Answers
from vime.data.records import Record

logger = logging.getLogger(__name__)


class AnswerCheck:
    """What is found in the answers of a set of rows.

    Args:
        num_rows: how many there are.
        measures: also find which answers would be cut, for which they are tokenised.
            They are, too, where a sample could be longer than a forward pass takes.
    """

    def __init__(self, answers: Answers, num_rows: int, *, measures: bool) -> None:
        self._answers, self._measures = answers, measures or answers.may_exceed
        self._drops = measures
        self._left_out: Counter[str] = Counter()
        self._num_rows = self._num_split = 0
        self.over: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        """[num_rows] whose answer would be cut."""
        self.too_long: dict[int, str] = {}
        """What is wrong with samples that no forward pass takes, by position."""

    def look(self, position: int, record: Record, prompt: str) -> None:
        """One row, and the text of its prompt. Raises: BadRow if its answer cannot be learnt."""
        pieces = self._answers.texts(record.prompt, record.label, record.metadata)
        self._num_rows += 1
        self._num_split += len(pieces) > 1
        self._left_out.update(what for piece in pieces for what in piece.left_out)
        if self._measures:
            (found,) = self._answers.tokenise([(self._answers.tokens(prompt), pieces)])
            self.over[position] = self._drops and any(a.response_length > self._answers.room(a) for a in found)
            if not self.over[position]:
                self._compare_with_budget(position, found)

    def _compare_with_budget(self, position: int, found: Sequence[Answer]) -> None:
        limit, room = self._answers.max_sample_len, self._answers.room
        longest = max((len(a.prompt) + min(a.response_length, room(a)) for a in found if room(a) > 0), default=0)
        if limit is not None and longest > limit:
            self.too_long[position] = (
                f"has {longest} tokens, and no forward pass takes more than {limit} (--max-tokens-per-gpu, times the "
                f"context-parallel ranks); raise it, or cut by --rollout-max-context-len {limit}"
            )

    def warn(self) -> None:
        """Say what a user should know of the answers as they will be learnt."""
        if self._answers.ends.closing is not None:
            logger.warning(
                "the chat template ends the assistant's turns with %r, which is learnt, but generation ends at %s: "
                "name it as eos_token_id in the checkpoint's generation_config.json, or engines will not stop there",
                self._answers.ends.closing,
                ", ".join(map(repr, self._answers.ends.stops)),
            )
        for what, count in sorted(self._left_out.items()):
            logger.warning("the chat template leaves out the %s of %d of the turns that are learnt", what, count)
        if self._num_split:
            logger.info(
                "%d of %d conversations are learnt as several samples: the template writes earlier turns differently "
                "once others follow",
                self._num_split,
                self._num_rows,
            )
