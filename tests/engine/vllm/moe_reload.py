"""Run as a program: sync a mixture of experts in one process, with the fix and with it taken out. Prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tests.weight_sync.hf_trainer import HfTrainer
from vime.weight_sync import shm

PROMPTS = [list(range(10, 30)), [7, 8, 9]]


def main(folder: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from vime.engine.vllm import fixes

    llm = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        distributed_executor_backend="uni",
        logprobs_mode="processed_logprobs",
        worker_extension_cls="vime.engine.vllm.worker_ext.WorkerExtension",
        weight_transfer_config={"backend": "vime"},
    )
    writer = shm.Writer()
    trainer = HfTrainer(Path(folder), writer)

    def sync(version: int) -> None:
        info = {"version": version, "transport": "shm", "names": trainer.weight_names()}
        llm.collective_rpc("init_weight_transfer_engine", args=(info,))
        llm.collective_rpc("start_weight_update")
        for bucket in trainer.weights(version):
            llm.collective_rpc("update_weights", args=(bucket.to_json(),))
        llm.collective_rpc("finish_weight_update")
        assert llm.reset_prefix_cache()

    def distance() -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
        worst = 0.0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            said = [next(iter(d.values())).logprob for d in output.outputs[0].logprobs]
            score = trainer.score([prompt + tokens])[0][len(prompt) :]
            worst = max(worst, float(np.abs(np.array(said) - score).max()))
        return worst

    result = {"start": distance()}
    trainer.perturb(1)
    result["stale"] = distance()
    sync(1)
    result["with_fix"] = distance()
    patched = UnquantizedFusedMoEMethod._setup_kernel
    UnquantizedFusedMoEMethod._setup_kernel = getattr(patched, fixes._MARK)  # type: ignore[method-assign]
    trainer.perturb(2)
    sync(2)
    result["without_fix"] = distance()
    writer.close()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
