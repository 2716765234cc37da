"""One data-parallel rank of test_ranks.py: python rank_worker.py RANK FOLDER.

FOLDER holds model/ and batches.pkl; the rank writes result-RANK.pkl.
"""

import pickle
import sys
from pathlib import Path

import numpy as np

from vime.config import AlgoConfig, Config, RolloutConfig
from vime.errors import TrainingError
from vime.platform import get_platform
from vime.trainer.megatron.trainer import MegatronTrainer
from vime.wire import BucketMessage


class CountingWriter:
    """Says how many tensors it got."""

    def write(self, tensors, version, index):
        return BucketMessage(version, index, (), len(tensors), {})

    def close(self): ...


def main(rank, folder):
    config = Config(
        algo=AlgoConfig(use_kl_loss=True, kl_loss_coef=0.05),
        rollout=RolloutConfig(rollout_temperature=0.8),
        megatron={"lr": 1e-2, "adam_eps": 1e-2},
    )
    trainer = MegatronTrainer(
        config,
        hf_path=str(folder / "model"),
        platform=get_platform("cpu"),
        rank=rank,
        world_size=2,
        init_method=f"file://{folder / 'rendezvous'}",
        total_steps=10,
        writer=CountingWriter() if rank == 0 else None,
    )
    batches = pickle.loads((folder / "batches.pkl").read_bytes())
    out = {"log_probs": trainer.log_probs(batches[0]), "scores": trainer.score([[1, 2, 3]])}
    out["metrics"] = [trainer.train(batch) for batch in batches]
    out["buckets"] = [None if m is None else m.num_bytes for m in trainer.weights(1)]
    trainer.export_hf(folder / "out")
    trainer.save(folder / "ck")
    out["after"] = trainer.train(batches[0])
    broken = batches[0]
    mine_of_rank_1 = broken.steps[0][1][0][0]
    broken.advantages[mine_of_rank_1] = np.nan
    try:
        trainer.train(broken)
    except TrainingError as error:
        out["error"] = str(error)
    trainer.close()
    (folder / f"result-{rank}.pkl").write_bytes(pickle.dumps(out))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
