"""Which prompt comes next: once an epoch, in shares, and the same again from any position."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.data.order import PromptOrder

parts_of_a_mixture = st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 10)), min_size=1, max_size=5)


def test_a_mixture_by_hand() -> None:
    order = PromptOrder([2, 3], weights=[1, 3], shuffle=False, seed=0)
    # Behind their shares of 1/4 and 3/4 after 1, 2, 3, 4 draws: (.25, .75), (.5, .5: the first), (-.25, 1.25), (0, 1).
    assert [order.draw()[1] for _ in range(9)] == [2, 0, 3, 4, 2, 1, 3, 4, 2]
    assert order.drawn == [2, 7]
    assert order.epoch_size == 5


@given(parts=parts_of_a_mixture, shuffle=st.booleans(), draws=st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_parts_keep_their_shares_and_no_prompt_comes_again_before_its_part_is_through(
    parts: list[tuple[int, float]], shuffle: bool, draws: int
) -> None:
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    order = PromptOrder(sizes, weights=weights, shuffle=shuffle, seed=3)
    seen: Counter[int] = Counter()
    for n in range(1, draws + 1):
        seen[order.draw()[1]] += 1
        for count, weight in zip(order.drawn, weights, strict=True):
            assert abs(count - n * weight / sum(weights)) < max(len(parts) - 1, 1e-6)
    start = 0
    for size in sizes:
        counts = [seen[i] for i in range(start, start + size)]
        assert max(counts) - min(counts) <= 1, "one epoch of the part after the other"
        start += size


@given(parts=parts_of_a_mixture, shuffle=st.booleans(), before=st.integers(0, 40), mixed=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_position_is_all_there_is(parts: list[tuple[int, float]], shuffle: bool, before: int, mixed: bool) -> None:
    def fresh() -> PromptOrder:
        weights = [weight for _, weight in parts] if mixed else None
        return PromptOrder([size for size, _ in parts], weights=weights, shuffle=shuffle, seed=5)

    first, second = fresh(), fresh()
    for _ in range(before):
        first.draw()
    second.move_to(first.drawn)
    assert [first.draw() for _ in range(30)] == [second.draw() for _ in range(30)]


def test_shuffles_of_a_mixture_are_stable() -> None:
    order = PromptOrder([4, 6], weights=[0.5, 0.5], shuffle=True, seed=7)
    # A literal: a change of numpy or of this code must not reorder the prompts of a run that is resumed.
    assert [order.draw()[1] for _ in range(10)] == [1, 7, 0, 6, 2, 8, 3, 4, 0, 5]


@pytest.mark.parametrize(
    ("sizes", "weights", "seed"),
    [([], None, 0), ([1, 0], None, 0), ([1], None, -1), ([1], [1, 2], 0), ([1, 1], [1, 0], 0)],
)
def test_impossible_orders_are_refused(sizes: list[int], weights: list[float] | None, seed: int) -> None:
    with pytest.raises(ValueError):
        PromptOrder(sizes, weights=weights, shuffle=True, seed=seed)


def test_a_position_of_another_order_is_refused() -> None:
    with pytest.raises(ValueError, match="for 2 parts"):
        PromptOrder([1, 1], weights=[1, 1], shuffle=False, seed=0).move_to([3])
