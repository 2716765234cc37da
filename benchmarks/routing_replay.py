"""What replaying the engine's experts adds to an optimizer step on one device, without engines.

    python benchmarks/routing_replay.py scripts/models/qwen3-30b-a3b/config.json --num-layers 6
    python benchmarks/routing_replay.py --tiny          # a model of a few thousand parameters, on the CPU

A model with experts and random weights takes optimizer steps on the same packed sequences, in turn with and without
rows to replay. The rows are the model's own choice, so that the experts have the same work. Each step is the first on
its rollout, in which tokens that the router would send elsewhere are counted, too. Prints a line of JSON, and appends
it to the file --out. Exit 0 if the median step with replay takes at most --bar times the one without. Needs no vLLM
and no Ray.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common import say, write_checkpoint  # noqa: E402
from benchmarks.train_step import batch_of  # noqa: E402
from vime.config import Config, RolloutConfig, TrainConfig  # noqa: E402
from vime.models import family_of  # noqa: E402
from vime.platform import get_platform  # noqa: E402
from vime.types import RoutedExperts, TrainBatch  # noqa: E402

WARM_UP_STEPS = 3
TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def seconds(work: Callable[[], object]) -> float:
    """Wall time of some work, on the device too."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def own_choice(trainer: Any, batch: TrainBatch) -> RoutedExperts:
    """The experts that the trainer's own routers choose for each token but a sample's last, as an engine gives them."""
    from vime.trainer.megatron import forward
    from vime.trainer.megatron.batches.routing_replay import RolloutRouting

    routers = trainer._routers
    routing = RolloutRouting(routers, batch, records=True)
    wanted = np.ones(len(batch.tokens), dtype=np.bool_)
    wanted[batch.cu_seqlens[:-1]] = False
    plan = batch.steps[0][0]
    columns = (batch.tokens, batch.cu_seqlens, plan, wanted)
    forward.shared_log_probs(
        trainer._forward, *columns, layout=trainer._layout, temperature=1.0, routing=routing.old_policy()
    )
    told = routing.training()
    assert told is not None and told.recorded is not None
    rows = np.zeros((len(batch.tokens), routers.num_layers, routers.top_k), np.uint8)
    for samples, chosen in told.recorded.items():
        places = np.concatenate([np.arange(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) for i in samples])
        rows[np.ix_(places, routers.layers)] = chosen.numpy()[: len(places)]
    last = batch.cu_seqlens[1:] - 1
    return RoutedExperts(np.delete(rows, last, axis=0), batch.lengths - 1)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one shape."""
    from vime.trainer.megatron.trainer import MegatronTrainer

    config = TINY if arguments.tiny else json.loads(arguments.config.read_text(encoding="utf-8"))
    if arguments.num_layers:
        config = {**config, "num_hidden_layers": arguments.num_layers}
    device = "cpu" if arguments.tiny else "cuda"
    write_checkpoint(folder / "model", config, device=device, dtype=torch.float32 if arguments.tiny else torch.bfloat16)
    megatron = {"lr": 1e-6, "bf16": not arguments.tiny, **json.loads(arguments.megatron)}
    trainer = MegatronTrainer(
        Config(megatron=megatron, rollout=RolloutConfig(rollout_temperature=1.0), train=TrainConfig()),
        hf_path=str(folder / "model"),
        platform=get_platform(device),
        rank=0,
        world_size=1,
        init_method=f"file://{folder / 'rendezvous'}",
        total_steps=1000,
        writer=None,
    )
    vocabulary = family_of(config).settings(config).vocab_size
    batch = batch_of(arguments.samples, arguments.length, arguments.prompt, arguments.micro_batch_size, vocabulary)
    routed = own_choice(trainer, batch)
    given = replace(batch, routed_experts=routed)
    free, replayed, metrics = [], [], {}
    for _ in range(WARM_UP_STEPS + arguments.steps):
        free.append(seconds(lambda: trainer.train(batch)))
        replayed.append(seconds(lambda: metrics.update(trainer.train(given))))
    trainer.close()
    free, replayed = free[WARM_UP_STEPS:], replayed[WARM_UP_STEPS:]
    return {
        "model": "tiny" if arguments.tiny else arguments.config.parent.name,
        "num_layers": config["num_hidden_layers"],
        "samples": arguments.samples,
        "length": arguments.length,
        "micro_batch_size": arguments.micro_batch_size,
        "megatron": megatron,
        "step_s": statistics.median(free),
        "step_with_replay_s": statistics.median(replayed),
        "ratio": statistics.median(replayed) / statistics.median(free),
        "step_s_all": free,
        "step_with_replay_s_all": replayed,
        "bytes_per_token": routed.rows.nbytes / len(routed.rows),
        "differs": metrics["train/routing_replay_differs"],
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def main() -> int:
    """Returns: the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", help="an HF config.json of a model with experts")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU in float32")
    parser.add_argument("--num-layers", type=int, help="instead of the config's: a cut of the model")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=1280, help="tokens of a sample (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=256, help="of these, not trained on (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help=f"of each kind, after {WARM_UP_STEPS} more")
    parser.add_argument("--megatron", default="{}", help="Megatron settings by field name, as JSON")
    parser.add_argument("--bar", type=float, default=1.03, help="largest ratio that is good (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    arguments = parser.parse_args()
    if arguments.tiny == (arguments.config is not None):
        parser.error("give a config.json, or --tiny")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    say(result, arguments.out)
    return 0 if result["ratio"] <= arguments.bar else 1


if __name__ == "__main__":
    sys.exit(main())
