"""The contracts of the hooks inside the trainer, on a tiny model."""

from dataclasses import replace

import numpy as np
import pytest

from tests.trainer.megatron.test_trainer import LENGTHS
from vime.types import PG_WEIGHTS, TOKEN_ADVANTAGES


def test_columns_of_the_batch_weight_tokens_and_give_each_its_advantage(model_folder, make_trainer, make_batch):
    folder, _ = model_folder()
    batch = make_batch(LENGTHS, micro=3)
    plain = make_trainer(folder).train(batch)
    spread = np.repeat(batch.advantages, batch.lengths).astype(np.float32)
    same = make_trainer(folder).train(replace(batch, extra={PG_WEIGHTS: batch.loss_weights, TOKEN_ADVANTAGES: spread}))
    assert same == {**plain, **{name: same[name] for name in same if name.startswith("perf/")}}
    for extra in ({PG_WEIGHTS: 2 * batch.loss_weights}, {TOKEN_ADVANTAGES: 2 * spread}):
        doubled = make_trainer(folder).train(replace(batch, extra=extra))
        assert doubled["train/pg_loss"] == pytest.approx(2 * plain["train/pg_loss"], rel=1e-5)
        assert doubled["train/entropy_loss"] == pytest.approx(plain["train/entropy_loss"], rel=1e-6)
