"""Truncated importance sampling, IcePop and MIS against the shared cases.

Our choice where frameworks differ: bounds are inclusive, divisors stay (--rejected-tokens counted); "kept denominator"
is the other variant (removed).
"""

import numpy as np
import torch

from tests.golden.loader import check, columns, cu_seqlens, each_case, spread
from vime.algo.correction import importance_weights, rejection
from vime.algo.reduce import sequence_mean_weights, token_mean_weights
from vime.algo.sequences import Sequences


@each_case("tis")
def test_weights_and_what_they_make_of_the_loss(case, dtype):
    p = case["params"]
    train, rollout, mask, pg_loss = columns(case, dtype, "logp_train", "logp_rollout", "mask", "pg_loss")
    on = mask != 0
    rows = torch.repeat_interleave(torch.tensor([len(row) for row in case["inputs"]["mask"]]))
    sequences = Sequences(rows[on], torch.zeros(int(rows[-1]) + 1, dtype=train.dtype).index_add(0, rows, mask))
    log_ratio = (train - rollout)[on]
    got = importance_weights(log_ratio, sequences, level=p["level"], mode=p["mode"], low=p["lo"], high=p["hi"])

    weights, changed = spread(got.weights, mask), spread((got.below | got.above).to(mask.dtype), mask)
    check(weights, case, "weights", dtype)
    check(changed, case, "changed", dtype)
    check(weights * pg_loss, case, "weighted_loss", dtype)
    borders, step = cu_seqlens(case), np.zeros(len(case["inputs"]["mask"]))
    token_mean = torch.from_numpy(token_mean_weights(mask.numpy(), borders, step))
    sequence_mean = torch.from_numpy(sequence_mean_weights(mask.numpy(), borders, step, count_empty=False))
    check((token_mean * changed).sum(), case, "changed_frac_token_mean", dtype)
    check((token_mean * weights * pg_loss).sum(), case, "loss_token_mean", dtype)
    check((sequence_mean * weights * pg_loss).sum(), case, "loss_seq_mean", dtype)
    if p["mode"] == "mask":
        kept = rejection(log_ratio, sequences, level=p["level"], low=p["lo"], high=p["hi"]).kept
        kept = spread(kept.to(mask.dtype), mask)
        check(kept, case, "kept_mask", dtype)
        left = torch.from_numpy(token_mean_weights(kept.numpy(), borders, step))
        check((left * weights * pg_loss).sum(), case, "loss_token_mean_kept_denominator", dtype)
