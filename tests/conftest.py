"""Fixtures that several parts share: a tiny model, and one running engine for the whole session."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import lanes

if TYPE_CHECKING:
    from vime.engine.vllm.server import EngineServer

RUN_KEY = "the-key-of-the-tests"

# The same examples each time, however long one takes: a run of the tests depends on the code alone.
settings.register_profile("vime", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vime")

if lanes.is_lane(os.environ):
    lanes.share_cores(os.environ, len(os.sched_getaffinity(0)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n 2` runs the tests in two lanes; called only where pytest-xdist is installed and asked for."""
    return lanes.scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process keeps the order of the files."""
    if lanes.is_lane(os.environ):
        lanes.longest_first(items)


@pytest.fixture(scope="session")
def run_key() -> str:
    """The run key that `engine` and `start_engine` demand."""
    return RUN_KEY


def save_tiny_model(folder: Path, kind: str = "qwen3", *, dtype: str = "float32", seed: int = 0, **more: Any) -> Path:
    """A random model (0.14M parameters and more, vocabulary of 320) with its byte-level tokenizer.

    Args:
        kind: qwen3, qwen3_moe, or glm4_moe: one dense layer and two of eight experts and a shared one, a correction
            bias that matters, and a multi-token-prediction layer behind them.
        more: settings of transformers' config.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    from vime.cli.tiny_model import add_mtp_layers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest vLLM's CPU attention takes
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,  # large, so that wrong weights show in the log-probs
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": dtype,
    }
    experts = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
    glm = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3}
    glm |= {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 1}
    torch.manual_seed(seed)
    model: Any = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes | more)),
        "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | experts | {"num_experts": 8} | more)),
        "glm4_moe": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**sizes | experts | glm | more)),
    }[kind]()
    model = model.to(getattr(torch, dtype))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.float().uniform_(-0.3, 0.3)  # a float32 buffer whatever the weights are
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind == "glm4_moe":
        add_mtp_layers(folder, num_layers=model.config.num_hidden_layers, num_mtp_layers=1)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Qwen3 in float32."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Qwen3 mixture of experts in float32."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "qwen3_moe", "qwen3_moe")


@pytest.fixture(scope="session")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineServer]]:
    """A function (model folder, **engine arguments) that starts an engine and waits for it; all are stopped at the end.

    Each takes about 20 s and 1.5 GiB: prefer the `engine` fixture.
    """
    from vime.config.dtype import stored_dtype
    from vime.engine.vllm.server import EngineServer
    from vime.platform.cpu import CpuPlatform

    servers: list[EngineServer] = []

    def start(
        model: Path, environment: dict[str, str] | None = None, *, routed_experts: bool = False, **arguments: Any
    ) -> EngineServer:
        platform = CpuPlatform()
        config = json.loads((model / "config.json").read_text())
        server = EngineServer(
            str(model),
            arguments={
                **platform.engine_arguments(512),
                "dtype": stored_dtype(config),
                "max_num_seqs": 64,
                "seed": 0,
                **arguments,
            },
            environment={
                **platform.engine_environment(routed_experts=routed_experts),
                "HF_HUB_OFFLINE": "1",
                **(environment or {}),
            },
            key=RUN_KEY,
            routed_experts=routed_experts,
            log_path=tmp_path_factory.mktemp("engine") / "engine.log",
        )
        servers.append(server)
        server.start()
        server.wait_ready(900)  # fails before only if the engine ends
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def engine(tiny_qwen3: Path, start_engine: Callable[..., EngineServer]) -> EngineServer:
    """A running engine that serves `tiny_qwen3`; a test that changes its weights must bring them back."""
    return start_engine(tiny_qwen3)
