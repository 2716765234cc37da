"""A real engine's routed experts against the router of transformers' model: every row, and no row too many or too few.

Slow: on a CPU, Triton's interpreter generates some tens of tokens a second.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import save_tiny_model
from vime.engine.vllm.answers import RoutingShape
from vime.engine.vllm.client import RouterClient
from vime.engine.vllm.control import VllmEngine
from vime.engine.vllm.server import EngineServer
from vime.models import family_of
from vime.protocols import Completion, GenerateRequest, SamplingParams
from vime.types import Sample

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 128  # tokens that the engine caches together


class Reference:
    """transformers' own model, which says which experts each token goes to."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._chosen: dict[int, Any] = {}
        for name, module in self.model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self._hook(int(name.split(".")[2])))

    def _hook(self, layer: int) -> Callable[..., None]:
        def keep(module: Any, inputs: Any, outputs: Any) -> None:
            # One of what a router gives back are the numbers of the experts.
            (self._chosen[layer],) = [o for o in outputs if not o.is_floating_point()]

        return keep

    def rows(self, tokens: tuple[int, ...], shape: RoutingShape) -> np.ndarray[Any, Any]:
        """[tokens - 1, layers, top_k] in ascending order; zeros for layers without experts."""
        import torch

        with torch.no_grad():
            self.model(torch.tensor([tokens]))
        rows = np.zeros((len(tokens), shape.num_layers, shape.top_k), np.uint8)
        for layer, chosen in self._chosen.items():
            rows[:, layer] = np.sort(chosen.reshape(len(tokens), shape.top_k).numpy())
        return rows[:-1]


@dataclass
class Served:
    """An engine that returns routed experts, and who knows the right ones."""

    server: EngineServer
    shape: RoutingShape
    reference: Reference
    key: str

    def ask(self, work: Callable[[RouterClient], Coroutine[Any, Any, Any]]) -> Any:
        async def run() -> Any:
            client = RouterClient(self.server.url, [self.server.url], self.key, routing=self.shape)
            try:
                return await work(client)
            finally:
                await client.aclose()

        return asyncio.run(run())

    def check(self, request: GenerateRequest, completion: Completion) -> None:
        """The rows of an answer are those of its tokens."""
        routed = completion.routed_experts
        assert routed is not None and routed.start == request.routed_experts_start
        wanted = self.reference.rows((*request.token_ids, *completion.token_ids), self.shape)[routed.start :]
        np.testing.assert_array_equal(np.sort(routed.rows), wanted)


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def served(
    request: pytest.FixtureRequest,
    start_engine: Callable[..., EngineServer],
    tmp_path_factory: pytest.TempPathFactory,
    run_key: str,
) -> Served:
    folder = save_tiny_model(tmp_path_factory.mktemp("routed") / request.param, request.param)
    config = json.loads((folder / "config.json").read_text())
    shape = RoutingShape.of(family_of(config).settings(config))
    return Served(start_engine(folder, routed_experts=True), shape, Reference(folder), run_key)


def asked(name: str, prompt_len: int, *, n: int = 1, max_tokens: int = 6, start: int = 0) -> GenerateRequest:
    tokens = tuple((7 * i + prompt_len) % 256 for i in range(prompt_len))
    sampling = SamplingParams(n=n, max_tokens=max_tokens, seed=prompt_len, ignore_eos=True)
    return GenerateRequest(request_id=name, token_ids=tokens, sampling=sampling, routed_experts_start=start)


def test_every_row_is_that_of_the_reference(served: Served) -> None:
    long = BLOCK + 30
    requests = [asked("group", 12, n=3), asked("short", 1), asked("cold", long), asked("one", 9, max_tokens=1)]
    # Once more with what is in the prefix cache by now, from the start and from behind the cached block.
    again = [asked("cached", long), asked("rest", long, start=long - 10), asked("last", long, start=long - 1)]

    async def work(client: RouterClient) -> list[list[Completion]]:
        first = await asyncio.gather(*map(client.generate, requests))
        return [*first, *(await asyncio.gather(*map(client.generate, again)))]

    for request, completions in zip([*requests, *again], served.ask(work), strict=True):
        assert len(completions) == request.sampling.n
        for completion in completions:
            served.check(request, completion)


def test_the_turns_of_a_sample_make_one_prefix_of_rows(served: Served) -> None:
    sample = Sample(tokens=asked("", 20).token_ids)

    async def work(client: RouterClient) -> None:
        for turn in range(2):
            request = GenerateRequest(
                request_id=f"turn-{turn}",
                token_ids=sample.tokens,
                sampling=SamplingParams(max_tokens=5, seed=turn, ignore_eos=True),
                routed_experts_start=sample.num_routed,
            )
            (said,) = await client.generate(request)
            assert said.routed_experts is not None and len(said.routed_experts.rows) == (24 if turn == 0 else 8)
            sample.append_response(
                said.token_ids, said.log_probs, version=said.weight_versions, routed_experts=said.routed_experts
            )
            if turn == 0:
                sample.append_response([1, 2, 3], trainable=False)  # a tool's answer and a half

    served.ask(work)
    assert sample.num_routed == len(sample.tokens) - 1
    assert sample.routed_experts is not None
    np.testing.assert_array_equal(np.sort(sample.routed_experts), served.reference.rows(sample.tokens, served.shape))


@pytest.mark.parametrize("end", ["abort", "reset"])
def test_a_request_that_is_disturbed_has_the_rows_of_what_it_got(served: Served, end: str) -> None:
    """Aborted with what it has; or frozen as by a weight sync, its cache dropped, computed again and gone on with."""
    control = VllmEngine(served.server.url, served.key)
    request = asked(end, 17, max_tokens=400 if end == "abort" else 24)

    async def work(client: RouterClient) -> Completion:
        before = control.stats().sampled_tokens
        answer = asyncio.create_task(client.generate(request))
        while not answer.done() and control.stats().sampled_tokens < before + 4:
            await asyncio.sleep(0.05)
        if end == "abort":
            await client.abort([request.request_id])
        else:
            control.pause("keep")
            control._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
            control.resume()
        return (await answer)[0]

    completion = served.ask(work)
    control.close()
    assert completion.finish_reason == ("abort" if end == "abort" else "length")
    assert len(completion.token_ids) >= 4
    served.check(request, completion)
