"""How far ahead of the trainer groups are begun."""

from __future__ import annotations


class Pace:
    """As far as is needed that the trainer need not wait, and no further than a bound.

    A rollout that lies finished while the trainer is at another one only grows older: where generation is the faster
    side, its groups would always be as old as is allowed. So the distance shrinks by a version when the trainer leaves
    a whole rollout behind, down to one ahead, and grows by one whenever the trainer waits. Where engines keep their
    weights for several rollouts, the last of these is so many versions ahead, and the next one is begun meanwhile.

    Args:
        most: versions that a group's oldest token may be behind the trainer (--max-staleness).
        interval: rollouts between two weight syncs (--update-weights-interval).
    """

    def __init__(self, most: int, interval: int = 1) -> None:
        self._most = self.ahead = most
        """`ahead`: versions that a group begun now may be behind the trainer that gets it, if groups end in order."""
        self._least = min(most, interval)

    def waits(self, behind: int) -> None:
        """The trainer has to wait. Args: behind: versions that the engines are behind the next rollout's trainer."""
        self.ahead = min(self._most, max(self.ahead + 1, behind))

    def leaves(self, num_rollouts: int) -> None:
        """The trainer did not wait, and so many whole rollouts are left finished behind the one that it took."""
        if num_rollouts:
            self.ahead = max(self.ahead - 1, self._least)
