"""A process that answers as vLLM's server does, as far as vime speaks to it: `python -m tests.stub_engine FLAGS`.

FLAGS are vLLM's; those that mean nothing here are ignored. It starts in a second or two and needs 0.3 GiB. A run
starts it in vLLM's place where `vime.engine.vllm.processes.SERVER_VARIABLE` names this module; settings.py says how
it behaves. Weights are received, checked and used as by a real engine, so that probes pass.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import uvicorn

from tests.stub_engine.app import StubApp
from tests.stub_engine.brains import end_tokens, make_brain
from tests.stub_engine.scheduler import Scheduler
from tests.stub_engine.settings import read_settings
from tests.stub_engine.weights import WeightReceiver
from vime.engine.vllm.launch import end_with_owner, remove_scratch
from vime.engine.vllm.middleware import RunKeyMiddleware
from vime.engine.vllm.versions import adapter_for, installed_vllm_version


def main() -> None:
    """Serve until ended."""
    end_with_owner()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    options, _ = parser.parse_known_args()
    if options.enable_return_routed_experts:
        raise SystemExit("the stub engine has no experts")
    try:
        asyncio.run(_serve(options))
    finally:
        remove_scratch()


async def _serve(options: argparse.Namespace) -> None:
    settings, adapter, eos = read_settings(), adapter_for(), end_tokens(options.model)
    time.sleep(settings.load_s)
    scheduler = Scheduler(make_brain(settings.brain, options.model), settings, adapter, options.max_model_len, eos)
    identity = {
        "config": json.loads((options.model / "config.json").read_text(encoding="utf-8")),
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
    }
    app = StubApp(scheduler, WeightReceiver(options.model), identity=identity, version=installed_vllm_version())
    config = uvicorn.Config(
        RunKeyMiddleware(app), host=options.host, port=options.port, log_level="warning", access_log=False, backlog=4096
    )
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    main()
