"""The reward server's client against a real server that is slow, fails, talks nonsense and recovers."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vime.config import Config, RewardConfig
from vime.errors import DataError
from vime.observability.metrics import is_defined
from vime.protocols import RolloutContext
from vime.rewards.pool import GraderPool
from vime.rewards.remote import RemoteFailure, RemoteReward
from vime.rewards.score import make_reward_function, score_samples, take_reward_metrics
from vime.types import Sample, SampleStatus

Behaviour = Callable[[dict[str, Any]], tuple[int, bytes]]


class RewardServer:
    """Answers as `behaviour` says: (request) -> (status, body). `seen` holds the requests with their times."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = lambda request: (200, b"1.0")
        self.seen: list[tuple[float, dict[str, Any]]] = []
        self.num_connections = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                outer.num_connections += 1
                super().setup()

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.append((time.monotonic(), request))
                status, body = outer.behaviour(request)
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    pass  # the client has given up, as some tests want

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[RewardServer]:
    server = RewardServer()
    yield server
    server.close()


@pytest.fixture
def client(server: RewardServer) -> Iterator[RemoteReward]:
    client = RemoteReward(server.url, max_retries=3, backoff_s=0.01, breaker_cooldown_s=0.1)
    yield client
    client.close()


def ask(client: RemoteReward, *responses: str) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(client.score({"response": r}) for r in responses), return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("body", "reward", "verdict"),
    [
        (b"0.25", 0.25, None),
        (b"true", 1.0, None),
        (b'{"helpful": 0.5, "safe": 1}', {"helpful": 0.5, "safe": 1.0}, None),
        (b'{"reward": 0.5}', 0.5, None),
        (b'{"reward": 0, "verdict": "unparseable"}', 0.0, "unparseable"),
        (b'{"reward": {"a": 1}, "verdict": "correct"}', {"a": 1.0}, "correct"),
    ],
)
def test_answers(server: RewardServer, client: RemoteReward, body: bytes, reward: Any, verdict: str | None) -> None:
    server.behaviour = lambda request: (200, body)
    (answer,) = ask(client, "x")
    assert (answer.reward, answer.verdict) == (reward, verdict)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>starting</html>",
        b"null",
        b'"1.0"',
        b"NaN",
        b"[1.0]",
        b"{}",
        b'{"reward": 1, "verdict": "fine"}',
        b'{"reward": 1, "points": 2}',
        b"[" * 100_000,
        b"1" * (2 << 20),
        b"\xff",
    ],
)
def test_nonsense_is_asked_again_and_is_never_a_zero(server: RewardServer, client: RemoteReward, body: bytes) -> None:
    server.behaviour = lambda request: (200, body) if len(server.seen) == 1 else (200, b"0.5")
    (answer,) = ask(client, "x")
    assert answer.reward == 0.5
    server.behaviour = lambda request: (200, body)
    (answer,) = ask(client, "x")
    assert isinstance(answer, RemoteFailure)
    assert answer.verdict == "crashed"


def test_a_slow_server_is_asked_again_and_then_given_up(server: RewardServer) -> None:
    given_up = threading.Event()

    def behaviour(request: dict[str, Any]) -> tuple[int, bytes]:
        if len(server.seen) <= 2 or request["response"] == "always slow":
            given_up.wait(60)
        return 200, b"1.0"

    server.behaviour = behaviour
    client = RemoteReward(server.url, timeout_s=0.2, max_retries=100, backoff_s=0.01, breaker_cooldown_s=0.01)
    (answer,) = ask(client, "x")
    client.close()
    assert answer.reward == 1.0
    assert len(server.seen) >= 3  # a busy machine may be late with the third answer, too
    client = RemoteReward(server.url, timeout_s=0.2, max_retries=3, backoff_s=0.01)
    (answer,) = ask(client, "always slow")
    client.close()
    given_up.set()
    assert isinstance(answer, RemoteFailure)
    assert answer.verdict == "timeout"
    assert "4 attempts; the last: no answer within 0.2 s" in str(answer)


def test_a_refused_sample_is_not_sent_again(server: RewardServer, client: RemoteReward) -> None:
    server.behaviour = lambda request: (422, b"no label") if request["response"] == "bad" else (200, b"1.0")
    good, bad, other = ask(client, "good", "bad", "other")
    assert (good.reward, other.reward) == (1.0, 1.0)
    assert "refused the sample with status 422: no label" in str(bad)
    assert len(server.seen) == 3


def test_waits_grow_between_retries(server: RewardServer) -> None:
    client = RemoteReward(server.url, max_retries=3, backoff_s=0.1)
    server.behaviour = lambda request: (503, b"") if len(server.seen) < 4 else (200, b"1.0")
    (answer,) = ask(client, "x")
    client.close()
    assert answer.reward == 1.0
    times = [at for at, _ in server.seen]
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    for wait, nominal in zip(waits, (0.1, 0.2, 0.4), strict=True):
        assert 0.5 * nominal <= wait  # jitter is half to one and a half times; a busy machine adds to it


def test_repeated_failures_pause_requests_until_a_probe_succeeds(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_well, may_probe = threading.Event(), threading.Semaphore(0)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        """The breaker's cool-down lasts until the test ends it."""
        pauses.append(seconds)
        while not may_probe.acquire(blocking=False):
            await asyncio.sleep(0.001)

    monkeypatch.setattr("vime.rewards.breaker.pause", pause)
    client = RemoteReward(server.url, max_retries=20, max_connections=8, backoff_s=0.001, breaker_cooldown_s=1.0)
    server.behaviour = lambda request: (200, b"1.0") if is_well.is_set() else (500, b"down")

    async def many() -> list[Any]:
        tasks = [asyncio.create_task(client.score({"response": str(i)})) for i in range(40)]
        for num_pauses in (1, 2):
            while len(pauses) < num_pauses:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)  # for what should not happen
            # Eight at a time; four failures let four others begin, the fifth opens the breaker; then one probe.
            assert 5 <= len(server.seen) <= 8 + 4 + num_pauses - 1
            if num_pauses == 2:
                is_well.set()
            may_probe.release()
        sent = len(server.seen)
        answers = await asyncio.gather(*tasks)
        assert len(server.seen) - sent <= 40
        return answers

    answers = asyncio.run(many())
    client.close()
    assert [answer.reward for answer in answers] == [1.0] * 40
    assert client.take_metrics()["failed_samples"] == 0
    assert 0.8 <= pauses[0] <= 1.2 and 1.6 <= pauses[1] <= 2.4, "doubled, with jitter"


def test_a_cancelled_probe_leaves_its_place_to_another(server: RewardServer) -> None:
    client = RemoteReward(server.url, max_retries=20, backoff_s=0.001, breaker_cooldown_s=0.2)
    is_well = threading.Event()
    server.behaviour = lambda request: (200, b"1.0") if is_well.is_set() else (500, b"down")

    async def cancel_all_but_one() -> Any:
        tasks = [asyncio.create_task(client.score({"response": str(i)})) for i in range(10)]
        while client.take_metrics().get("breaker_openings", 0) == 0:
            await asyncio.sleep(0.01)
        is_well.set()
        for task in tasks[:9]:
            task.cancel()
        return await asyncio.wait_for(tasks[9], 60)

    assert asyncio.run(cancel_all_but_one()).reward == 1.0
    client.close()


def test_a_server_that_is_not_there_is_a_failure_with_its_reason() -> None:
    with socket.socket() as taken:  # nobody else can listen there meanwhile
        taken.bind(("127.0.0.1", 0))
        client = RemoteReward(f"http://127.0.0.1:{taken.getsockname()[1]}", max_retries=1, backoff_s=0.01)
        (answer,) = ask(client, "x")
    client.close()
    assert isinstance(answer, RemoteFailure)
    assert "ClientConnectorError" in str(answer)
    assert client.take_metrics() == {"requests": 2, "retries": 1, "failed_samples": 1, "breaker_openings": 0}
    assert client.take_metrics() == {}


def test_connections_are_kept_between_event_loops_and_limited(server: RewardServer) -> None:
    client = RemoteReward(server.url, max_connections=3)
    for _ in range(3):
        assert all(answer.reward == 1.0 for answer in ask(client, *"abcdefgh"))
    client.close()
    assert len(server.seen) == 24
    assert server.num_connections <= 3


def test_what_is_no_json_cannot_be_sent(client: RemoteReward) -> None:
    with pytest.raises(DataError, match="as JSON, which fails"):
        asyncio.run(client.score({"label": object()}))


def test_the_runs_reward_may_come_from_the_server(server: RewardServer) -> None:
    def behaviour(request: dict[str, Any]) -> tuple[int, bytes]:
        if request["response"] == "refuse":
            return 400, b"no"
        return 200, json.dumps({"reward": float(request["response"] == request["label"])}).encode()

    server.behaviour = behaviour
    pool = GraderPool()

    def score(samples: list[Sample], **settings: Any) -> tuple[list[Sample], dict[str, float]]:
        rewards = RewardConfig(rm_url=server.url, rm_url_max_retries=0, **settings)
        reward = make_reward_function(rewards, pool)
        context = RolloutContext(Config(reward=rewards), engines=None, tokenizer=None, reward=reward)  # type: ignore[arg-type]
        asyncio.run(score_samples(context, samples))
        reward.close()
        return samples, take_reward_metrics(context)

    def sample(response: str, **fields: Any) -> Sample:
        return Sample(prompt="2+2", response=response, label="4", status=SampleStatus.COMPLETED, **fields)

    samples, metrics = score([sample("4", sample_id=7, group_id=2), sample("5"), sample("refuse")], rm_type="remote_rm")
    assert [s.reward for s in samples] == [1.0, 0.0, None]
    assert samples[2].status is SampleStatus.FAILED
    assert samples[2].metadata["reward_verdict"] == "crashed"
    first = next(request for _, request in server.seen if request["sample_id"] == 7)
    assert first == {"prompt": "2+2", "response": "4", "label": "4", "metadata": {}, "group_id": 2, "sample_id": 7}
    assert metrics["rollout/remote_rm/requests"] == 3
    assert all(is_defined(name) for name in metrics)

    boxed, _ = score([sample(r"so \boxed{4}"), sample("4")], rm_type="boxed_remote_rm")
    assert [s.reward for s in boxed] == [1.0, 0.0]
    assert boxed[1].metadata["reward_verdict"] == "unparseable"

    parts, _ = score(
        [sample("4", metadata={}), sample("refuse")],
        rm_parts={"remote_rm": 1.0, "f1": 1.0},
        reward_key="total",
        rm_failure_reward=-1.0,
    )
    assert [s.reward for s in parts] == [{"remote_rm": 1.0, "f1": 1.0, "total": 2.0}, -1.0]
    pool.close()
