"""Which policy versions a sample's tokens are of."""

from vime.data.versions import mask_before, num_without_version, trainable_versions
from vime.types import Sample, VersionSpan


def sample() -> Sample:
    """Two tokens each of versions 1, 2 and 4; a tool's tokens between the last two, and the first of version 2."""
    made = Sample(tokens=(1,))
    made.append_response([5, 5], [-1.0, -1.0], version=1)
    made.append_response([5, 5], [-1.0, -1.0], version=2)
    made.append_response([7, 7], trainable=False)
    made.append_response([5, 5], [-1.0, -1.0], version=4)
    made.mask_response(2, 3)
    return made


def test_versions_without_a_trainable_token_do_not_count() -> None:
    made = sample()
    assert trainable_versions(made) == [1, 2, 4]
    made.mask_response(0, 2)
    assert trainable_versions(made) == [2, 4]


def test_tokens_of_earlier_versions_lose_their_gradient() -> None:
    made = sample()
    assert mask_before(made, 4) == 3 and made.loss_mask == (0, 0, 0, 0, 0, 0, 1, 1)
    assert mask_before(made, 4) == 0


def test_trainable_tokens_without_a_version_are_counted() -> None:
    made = sample()
    assert num_without_version(made) == 0
    made.append_response([5, 5, 5], [-1.0] * 3)
    assert num_without_version(made) == 3
    assert (
        num_without_version(
            Sample(
                weight_versions=(VersionSpan(1, 0, 1),),
                tokens=(1,),
                response_length=1,
                loss_mask=(0,),
                rollout_log_probs=(0.0,),
            )
        )
        == 0
    )
