"""Run as a program: sync mixtures of experts in one process, rightly and wrongly. Prints JSON.

Arguments: a JSON list of models, each with name, folder, dtype, whether to sync it wrongly, too, and whether it has a
drafter of its own multi-token-prediction layer; a folder for what is written.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from tests.weight_sync.hf_trainer import HfTrainer, Named
from vime.protocols import Completion, ProbeResult
from vime.weight_sync import shm
from vime.weight_sync.verify import DEFAULT_TOLERANCE, compare_probe, probe_sequences
from vime.wire import checksum

PROMPTS = [list(range(10, 30)), [7, 8, 9]]
EXPERT = "model.layers.1.mlp.experts.{}.down_proj.weight"


class Bench:
    """An engine in this process, and a trainer of the same checkpoint."""

    def __init__(self, folder: Path, dtype: str, drafter: bool = False) -> None:
        more: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if drafter else {}
        self.llm = LLM(
            model=str(folder),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            distributed_executor_backend="uni",
            logprobs_mode="processed_logprobs",
            worker_extension_cls="vime.engine.vllm.worker_ext.WorkerExtension",
            weight_transfer_config={"backend": "vime"},
            **more,
        )
        self.folder, self.dtype, self.version = folder, dtype, 0
        self.writer = shm.Writer()
        self.trainer = HfTrainer(folder, self.writer, dtype=getattr(torch, dtype))

    def sync(self) -> None:
        self.version += 1
        info = {"version": self.version, "transport": "shm", "names": self.trainer.weight_names()}
        self.llm.collective_rpc("init_weight_transfer_engine", args=(info,))
        self.llm.collective_rpc("start_weight_update")
        for bucket in self.trainer.weights(self.version):
            self.llm.collective_rpc("update_weights", args=(bucket.to_json(),))
        self.llm.collective_rpc("finish_weight_update")
        assert self.llm.reset_prefix_cache()

    def refusal(self) -> str:
        """Why a sync failed; empty if it did not."""
        try:
            self.sync()
        except Exception as error:
            self.llm.collective_rpc("vime_abandon_sync", args=("it failed",))
            return str(error)
        return ""

    def answers(self) -> tuple[list[list[int]], list[list[float]]]:
        """Greedy tokens and their log-probs."""
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
        chosen = [output.outputs[0] for output in outputs]
        log_probs = [[next(iter(d.values())).logprob for d in c.logprobs or []] for c in chosen]
        return [list(c.token_ids) for c in chosen], log_probs

    def distance(self) -> float:
        """From HF's log-probs: what a probe bounds in this dtype, the largest or the mean difference."""
        tokens, log_probs = self.answers()
        completions = [
            Completion(token_ids=tuple(t), log_probs=tuple(lp), finish_reason="length", weight_versions=())
            for t, lp in zip(tokens, log_probs, strict=True)
        ]
        probe = ProbeResult(tuple(map(tuple, PROMPTS)), tuple(completions))
        return DEFAULT_TOLERANCE[self.dtype].value(compare_probe(probe, self.trainer.score(probe_sequences(probe))))

    def export(self, folder: Path) -> None:
        """Write the trainer's weights as a checkpoint that an engine can start from."""
        self.trainer.model.save_pretrained(folder)
        for file in self.folder.glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())

    def drafter(self) -> dict[str, int]:
        """Checksums of the drafter's parameters."""

        def sums(worker: Any) -> dict[str, int]:
            model = worker.model_runner.drafter.model
            return {name: checksum(p.detach().contiguous()) for name, p in model.named_parameters() if p.numel()}

        return dict(self.llm.collective_rpc(sums)[0])

    def pass_over(self, victim: str | None) -> None:
        """Let vLLM's loader ignore a tensor, without a word; None: no more."""

        def patch(worker: Any) -> None:
            model = worker.model_runner.model
            model.__dict__.pop("load_weights", None)
            load = model.load_weights
            if victim is not None:
                model.load_weights = lambda tensors: load([(n, t) for n, t in tensors if n != victim])

        self.llm.collective_rpc(patch)

    def close(self) -> None:
        self.writer.close()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def swapped(stream: Iterator[Named]) -> Iterator[Named]:
    """Two experts' tensors under each other's names."""
    tensors = dict(stream)
    first, second = EXPERT.format(0), EXPERT.format(1)
    tensors[first], tensors[second] = tensors[second], tensors[first]
    return iter(tensors.items())


def three_syncs(bench: Bench, folder: Path) -> dict[str, Any]:
    """What every model must go through; `answers` are those of the weights exported to the folder."""
    result: dict[str, Any] = {"start": bench.distance(), "synced": []}
    for seed in (1, 2, 3):
        bench.trainer.perturb(seed)
        result["stale"] = bench.distance()
        bench.sync()
        result["synced"].append(bench.distance())
    result["answers"] = bench.answers()
    bench.export(folder)
    return result


def from_a_fresh_engine(answers: Any, folder: Path, dtype: str) -> float:
    """How far answers are from those of an engine that starts from the checkpoint; infinite for other tokens."""
    bench = Bench(folder, dtype)
    tokens, log_probs = bench.answers()
    bench.close()
    return float(np.abs(np.array(answers[1]) - np.array(log_probs)).max()) if answers[0] == tokens else float("inf")


def wrong_syncs(bench: Bench) -> dict[str, Any]:
    """An expert's tensor that is left out, passed over, or another's; then a sync that is right again."""
    victim, trainer = EXPERT.format(5), bench.trainer
    result: dict[str, Any] = {}
    trainer.perturb(4)
    trainer.edit = lambda stream: ((name, tensor) for name, tensor in stream if name != victim)
    result["left_out"] = bench.refusal()
    trainer.edit = lambda stream: stream
    bench.pass_over(victim)
    result["passed_over"] = bench.refusal()
    bench.pass_over(None)
    trainer.edit = swapped
    result["swapped"] = [bench.refusal(), bench.distance()]
    trainer.edit = lambda stream: stream
    bench.sync()
    result["right_again"] = bench.distance()
    return result


def without_the_fix(bench: Bench) -> float:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from vime.engine.vllm import fixes

    patched = UnquantizedFusedMoEMethod._setup_kernel
    UnquantizedFusedMoEMethod._setup_kernel = getattr(patched, fixes._MARK)  # type: ignore[method-assign]
    bench.trainer.perturb(5)
    bench.sync()
    UnquantizedFusedMoEMethod._setup_kernel = patched  # type: ignore[method-assign]
    return bench.distance()


def main(cases: list[dict[str, Any]], scratch: Path) -> None:
    results = {}
    for case in cases:
        bench = Bench(Path(case["folder"]), case["dtype"], case.get("drafter", False))
        if case.get("drafter"):
            before = bench.drafter()
            bench.trainer.perturb(1)
            bench.sync()
            after = bench.drafter()
            changed = sorted(name for name in before if before[name] != after[name])
            result = {"synced": [bench.distance()], "kept": len(before) - len(changed), "changed": changed}
        else:
            folder = scratch / f"{case['name']}-exported"
            result = three_syncs(bench, folder)
            if case.get("wrong"):
                result |= wrong_syncs(bench)
                result["without_fix"] = without_the_fix(bench)
        bench.close()
        if "answers" in result:
            result["fresh"] = from_a_fresh_engine(result.pop("answers"), folder, case["dtype"])
        results[case["name"]] = result
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
