"""GAE, whitening and the value loss against the shared cases.

Our choice where frameworks differ (cases/DISAGREEMENTS.md): tokens under mask 0 are no steps, a cut-off episode is
bootstrapped, whitening divides by n - 1; the other variants are arguments. The value loss has no factor of 1/2.
"""

import numpy as np
import pytest
import torch

from tests.golden.loader import check, columns, cu_seqlens, each_case, spread
from vime.algo.gae import gae
from vime.algo.reduce import token_loss_weights, token_mean_weights
from vime.algo.value_loss import ValueLoss, value_loss
from vime.algo.whiten import whiten


@each_case("gae")
@pytest.mark.parametrize("masked_value", ["as given", float("nan")])
@pytest.mark.parametrize("masked", ["skip", "zero", "all"])
def test_gae(case, dtype, masked, masked_value):
    rewards, values, mask = (c.numpy() for c in columns(case, dtype, "token_rewards", "values", "mask"))
    if masked_value != "as given":
        if masked == "all":
            return  # counts them
        rewards[mask == 0] = values[mask == 0] = masked_value
    steps = np.ones_like(mask) if masked == "all" else mask
    p = case["params"]
    got = gae(
        *(rewards, values, steps, cu_seqlens(case), np.array(case["inputs"]["bootstrap"], dtype)),
        gamma=p["gamma"],
        lam=p["lam"],
        masked="zero" if masked == "zero" else "skip",
    )
    of_variant = case | {"expected": case["expected"][masked]}
    check(got.advantages, of_variant, "advantages", dtype)
    check(got.returns, of_variant, "returns", dtype)
    if p.get("whiten") and masked == "skip":
        check(whiten(got.advantages, mask), of_variant, "whitened_unbiased", dtype)
        check(whiten(got.advantages, mask, unbiased=False), of_variant, "whitened_biased", dtype)


@each_case("whiten")
@pytest.mark.parametrize("masked_value", ["as given", float("nan")])
def test_whiten(case, dtype, masked_value):
    x, mask = (c.numpy() for c in columns(case, dtype, "x", "mask"))
    if masked_value != "as given":
        x[mask == 0] = masked_value
    eps = case["params"]["eps"]
    check(whiten(x, mask, eps=eps), case, "unbiased_add_eps", dtype)
    check(whiten(x, mask, eps=eps, unbiased=False), case, "biased_add_eps", dtype)
    check(whiten(x, mask, eps=eps, unbiased=False, clamp=True), case, "biased_clamp_eps", dtype)
    check(whiten(x, mask, eps=eps, shift_mean=False), case, "unbiased_keep_mean", dtype)


@each_case("value_loss")
def test_value_loss(case, dtype):
    values, old, returns, mask = columns(case, dtype, "values", "old_values", "returns", "mask")
    on = mask != 0
    got = value_loss(values[on], old[on], returns[on], clip=case["params"]["clip"])
    got = ValueLoss(*(spread(column, mask) for column in got))
    check(got.loss, case, "token_loss_no_half", dtype)
    borders, rows = cu_seqlens(case), len(case["inputs"]["mask"])
    token_mean = torch.from_numpy(token_mean_weights(mask.numpy(), borders, np.zeros(rows)))
    seq_mean = torch.from_numpy(token_loss_weights(mask.numpy(), borders, np.arange(rows), rows))
    check((got.loss * token_mean).sum(), case, "token_mean_no_half", dtype)
    check((0.5 * got.loss * token_mean).sum(), case, "token_mean_half", dtype)
    check((got.loss * seq_mean).sum(), case, "seq_mean_no_half", dtype)
    check((got.clipped * token_mean).sum(), case, "clipfrac_branch", dtype)
    check((got.moved * token_mean).sum(), case, "clipfrac_moved", dtype)
