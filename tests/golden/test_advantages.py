"""Advantage estimators without a critic against the shared cases.

Our choice where frameworks differ (cases/DISAGREEMENTS.md): group std with n - 1, a group of one gets 0 with every
estimator that compares, siblings count once; tokens under mask 0 are no steps of a return, and whitening divides by
n - 1.
"""

import numpy as np
import pytest

from tests.golden.loader import check, columns, cu_seqlens, each_case
from vime.algo.advantages import AdvantageInputs, group_advantages
from vime.algo.estimate import estimate
from vime.algo.reinforce_pp import reinforce_plus_plus, token_rewards
from vime.algo.whiten import whiten


def inputs_of(case, dtype, **changes):
    given = case["inputs"]
    n = len(given["rewards"])
    if "mask" in given:
        borders, mask = cu_seqlens(case), columns(case, dtype, "mask")[0].numpy()
    else:
        borders, mask = np.arange(n + 1), np.ones(n)
    settings = dict(
        rewards=np.array(given["rewards"], dtype),
        group_ids=np.array(given.get("group_ids", range(n))),
        trajectory_ids=np.array(given.get("rollout_ids", range(n))),
        cu_seqlens=borders,
        mask=mask,
    )
    return AdvantageInputs(**{**settings, **changes})


@each_case("group_advantages")
def test_group_advantages(case, dtype):
    inputs = inputs_of(case, dtype, std_eps=case["params"]["eps"])
    rewards, ids = inputs.rewards, case["inputs"].get("rollout_ids")
    check(group_advantages(rewards, inputs.group_ids, ids, std_eps=inputs.std_eps), case, "grpo_unbiased_std", dtype)
    for name, key in (("grpo", "grpo_unbiased_std"), ("gspo", "grpo_unbiased_std"), ("cispo", "grpo_unbiased_std")):
        check(estimate(name, inputs).per_sample, case, key, dtype)
    check(estimate("dr_grpo", inputs).per_sample, case, "dr_grpo", dtype)
    rloo = "rloo_singleton_zero" if "rloo_singleton_zero" in case["expected"] else "rloo"
    check(estimate("rloo", inputs).per_sample, case, rloo, dtype)


@each_case("reinforce_pp")
@pytest.mark.parametrize("masked_value", ["as given", float("nan")])
def test_reinforce_plus_plus(case, dtype, masked_value):
    p = case["params"]
    (kl,) = columns(case, dtype, "kl")
    inputs = inputs_of(case, dtype, token_penalties=p["kl_coef"] * kl.numpy(), gamma=p["gamma"])
    if masked_value != "as given":
        inputs.token_penalties[inputs.mask == 0] = masked_value
    check(token_rewards(inputs), case, "token_rewards", dtype)
    returns = reinforce_plus_plus(inputs)
    for key, got in (
        ("returns", returns),
        ("advantages_unbiased", whiten(returns, inputs.mask, eps=p["eps"])),
        ("advantages_biased", whiten(returns, inputs.mask, eps=p["eps"], unbiased=False)),
        ("advantages_unbiased", estimate("reinforce_plus_plus", inputs, whitened=True).per_token),
    ):
        check(got, case | {"expected": case["expected"][key]}, "skip", dtype)


@each_case("reinforce_pp_baseline")
def test_reinforce_plus_plus_baseline(case, dtype):
    p = case["params"]
    (kl,) = columns(case, dtype, "kl")
    inputs = inputs_of(case, dtype, token_penalties=p["kl_coef"] * kl.numpy())
    check(estimate("dr_grpo", inputs_of(case, dtype)).per_sample, case, "centred_rewards", dtype)
    got = estimate("reinforce_plus_plus_baseline", inputs, whitened=True)
    check(got.per_token, case, "advantages_unbiased", dtype)
    unwhitened = estimate("reinforce_plus_plus_baseline", inputs).per_token
    check(whiten(unwhitened, inputs.mask, eps=p["eps"], unbiased=False), case, "advantages_biased", dtype)
