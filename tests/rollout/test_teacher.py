"""A served teacher: asked by token ids, compared before the run, asked again where that may help."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vime.config import TeacherConfig
from vime.errors import ConfigError, EngineError
from vime.rollout import teacher as module
from vime.rollout.teacher import ServedTeacher
from vime.types import Group, Sample


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 100 for c in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def get_added_vocab(self) -> dict[str, int]:
        return {"<think>": 9999, "<end>": 9990}

    def __len__(self) -> int:
        return 10_000


class Server(ThreadingHTTPServer):
    """Answers as vLLM does: token t at position k has the log-prob -(t + k) / 100."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: list[dict[str, Any]] = [{"id": "big", "max_model_len": 33}]
        self.key, self.shift, self.failures, self.unknown = "", 0, 0, -1
        self.status, self.scores, self.keys = 200, 1.0, set[str]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": self.models}
        if path == "/tokenize":
            return 200, {"tokens": [t + self.shift for t in Letters().encode(body["prompt"])]}
        if path == "/detokenize":
            return 200, {"prompt": Letters().decode([t for t in body["tokens"] if t != self.unknown])}
        assert (path, body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("/v1/completions", "big", 1, 0)
        if self.failures:
            self.failures -= 1
            return 503, {"error": "busy"}
        if self.status != 200:
            return self.status, {"error": "too long"}
        entries = [None, *({str(t): {"logprob": -self.scores * (t + k) / 100}} for k, t in enumerate(body["prompt"]))]
        return 200, {"choices": [{"prompt_logprobs": [entries[0], *entries[2:]]}]}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or "null")
        self.server.keys.add(self.headers.get("Authorization") or "")
        status, answer = self.server.answer(self.path, body)
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            status, answer = 401, {"error": "who?"}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "_FIRST_BACKOFF_S", 0.0)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def teacher_of(server: Server, *, key: str | None = None, **settings: Any) -> ServedTeacher:
    return ServedTeacher(TeacherConfig(opd_teacher_url=server.url + "/v1", **settings), key)


def sample(prompt: list[int], response: list[int]) -> Sample:
    made = Sample(tokens=tuple(prompt), sample_id=len(response), group_id=7)
    made.append_response(response, [-1.0] * len(response))
    return made


def test_each_response_gets_its_log_probs_and_is_asked_once(server: Server) -> None:
    server.key = "secret"
    samples = [sample([5, 6], [7, 8, 9]), sample([1], [2]), sample([3], [])]
    teacher = teacher_of(server, key="secret")
    teacher.check(Letters(), 32)
    metrics = teacher.score([Group(7, samples)])
    assert samples[0].teacher_log_probs == pytest.approx([-(7 + 2) / 100, -(8 + 3) / 100, -(9 + 4) / 100])
    assert samples[1].teacher_log_probs == pytest.approx([-(2 + 1) / 100])
    assert samples[2].teacher_log_probs is None
    assert (metrics["rollout/teacher/requests"], metrics["rollout/teacher/retries"]) == (2, 0)
    assert teacher.score([Group(7, samples)])["rollout/teacher/requests"] == 0
    samples[1].append_response([4], [-1.0])  # it goes on, so the teacher has not seen all of it
    assert samples[1].teacher_log_probs is None
    assert server.keys == {"Bearer secret"}


def test_a_failure_that_passes_is_asked_again_and_one_that_stays_is_named(server: Server) -> None:
    asked = sample([5, 6], [7, 8])
    server.failures = 2
    metrics = teacher_of(server, opd_teacher_model="big").score([Group(7, [asked])])
    assert (metrics["rollout/teacher/requests"], metrics["rollout/teacher/retries"]) == (3, 2)
    assert asked.teacher_log_probs is not None
    server.failures = 100
    with pytest.raises(EngineError, match=r"no log-probs of sample 2 of group 7 in 3 attempts; the last: status 503"):
        teacher_of(server, opd_teacher_model="big", opd_teacher_max_retries=2).score([Group(7, [sample([1], [2, 3])])])
    server.failures, server.status = 0, 400
    with pytest.raises(EngineError, match=r"refused sample 2 of group 7: status 400: .*too long"):
        teacher_of(server, opd_teacher_model="big").score([Group(7, [sample([1], [2, 3])])])
    server.status, server.scores = 200, -1.0
    with pytest.raises(EngineError, match=r"a log-prob of 0\.03, which is none; .* without --logprobs-mode"):
        teacher_of(server, opd_teacher_model="big").score([Group(7, [sample([1], [2, 3])])])


def test_what_cannot_teach_is_found_before_the_run(server: Server) -> None:
    def problem(max_len: int = 32, **settings: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            teacher_of(server, **settings).check(Letters(), max_len)
        return str(caught.value)

    assert "takes 33 tokens, but a sample may have 33" in problem(33) and "--max-model-len 34" in problem(33)
    assert "serves big, and not small; give one as --opd-teacher-model" in problem(opd_teacher_model="small")
    server.models.append({"id": "other", "max_model_len": None})
    assert "serves big, other, and none is chosen" in problem()
    server.unknown = 494
    assert "tokenizer than --hf-checkpoint: the same ids are other text there" in problem(opd_teacher_model="big")
    server.unknown = 9999  # all else is alike, and no text of the comparison holds it
    assert "the same ids of added tokens, such as those of chats, are other text" in problem(opd_teacher_model="big")
    server.shift = 1
    assert "has another tokenizer than --hf-checkpoint: 'The teacher says" in problem(opd_teacher_model="big")
    server.key = "secret"
    assert "answers 401: it wants another key" in problem(key="wrong")
    server.models = [{}]
    server.key = ""
    assert "does not answer as a vLLM server does" in problem()
    nobody = ServedTeacher(TeacherConfig(opd_teacher_url="http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match="does not answer as a vLLM server does: ClientConnector"):
        nobody.check(Letters(), 32)


def test_calling_off_what_has_just_ended_does_nothing(server: Server) -> None:
    async def own() -> tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]:
        return asyncio.get_running_loop(), asyncio.current_task()

    teacher = teacher_of(server)
    teacher._loop, teacher._work = asyncio.run(own())  # as read before the loop was closed
    teacher.call_off()


def test_asking_can_be_called_off(server: Server) -> None:
    server.failures = 1 << 30
    teacher = teacher_of(server, opd_teacher_model="big", opd_teacher_max_retries=1 << 20)
    errors: list[BaseException] = []

    def score() -> None:
        try:
            teacher.score([Group(7, [sample([1], [2])])])
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    while thread.is_alive():
        teacher.call_off()
        thread.join(0.05)
    assert "called off" in str(errors[0])
