"""Cross-checks of the corrections for the mismatch between engine and trainer (--use-tis, --use-rs)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vime.config import Config


def check_correction(config: Config) -> Iterator[str]:
    """What is wrong with them, one sentence each."""
    algo = config.algo
    if algo.loss_type != "policy_loss":
        return  # nothing of it is read; said elsewhere
    if algo.use_tis and algo.custom_tis_function_path is None and algo.tis_clip < algo.tis_clip_low:
        yield (
            f"--tis-clip-low is {algo.tis_clip_low}, more than --tis-clip {algo.tis_clip}; they are the lower and the "
            "upper bound of the importance ratio"
        )
    if algo.use_tis and algo.use_rollout_logprobs:
        yield (
            "--use-tis corrects for the engine's log-probs and --use-rollout-logprobs puts them into the loss's ratio, "
            "which corrects for them, too; choose one"
        )
    low, high = algo.rs_lower_bound, algo.rs_upper_bound
    if algo.use_rs and low is None and high is None and algo.rs_veto_threshold is None:
        yield "--use-rs rejects nothing without --rs-lower-bound, --rs-upper-bound or --rs-veto-threshold; give one"
    if algo.use_rs and low is not None and high is not None and low > high:
        yield f"--rs-lower-bound is {low}, more than --rs-upper-bound {high}; between them tokens are kept"
    if algo.rejected_tokens == "removed":
        if algo.custom_tis_function_path is not None:
            yield (
                "--rejected-tokens removed takes tokens out before the first step, but --custom-tis-function-path "
                "weights them micro-batch by micro-batch; use counted"
            )
        if algo.custom_pg_loss_reducer_function_path is not None:
            yield (
                "--rejected-tokens removed makes the weights of the tokens that are left anew, but "
                "--custom-pg-loss-reducer-function-path has made them before; use counted"
            )


_TIS = ("tis_level", "tis_mode", "tis_clip", "tis_clip_low")
_RS = ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")
_ALL = ("use_tis", "use_rs", "custom_tis_function_path", "rejected_tokens", "use_rollout_logprobs", *_TIS, *_RS)


def _keys(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"algo.{name}" for name in names)


RULES: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (_keys((*_TIS, "custom_tis_function_path")), lambda c: not c.algo.use_tis, "add --use-tis"),
    (
        _keys(_TIS),
        lambda c: c.algo.use_tis and c.algo.custom_tis_function_path is not None,
        "--custom-tis-function-path makes the weights",
    ),
    (_keys(_RS), lambda c: not c.algo.use_rs, "add --use-rs"),
    (
        _keys(("rs_level",)),
        lambda c: c.algo.use_rs and c.algo.rs_lower_bound is None and c.algo.rs_upper_bound is None,
        "it says what --rs-lower-bound and --rs-upper-bound are bounds of; give one of them",
    ),
    (
        _keys(("rejected_tokens",)),
        lambda c: not c.algo.rejects_tokens,
        "nothing is rejected; add --use-rs, or --use-tis with --tis-mode mask",
    ),
    (_keys(_ALL), lambda c: c.algo.loss_type == "custom_loss", "--loss-type custom_loss has a loss of its own"),
)
"""When nobody reads them; supervised training reads none of them."""
NOT_SUPERVISED = _keys(_ALL)
