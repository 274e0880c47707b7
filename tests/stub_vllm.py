"""A server that speaks as much of vLLM's HTTP as the client needs and has no model: what it "samples" follows from the
request's seed and the sample's number."""

import argparse
import json
import os
import random
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class StubVLLM(ThreadingHTTPServer):
    """`received`: the path and body of every POST, in their order, without what is asked of one who is joined.
    `answer`: gives status and text for a path and a body, or None to go on as usual; it may wait."""

    daemon_threads = True

    def __init__(self, model: str, root: str, port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.port = self.server_address[1]
        self.models = [{"id": model, "root": root, "max_model_len": 2048}]
        self.tokenize = lambda text: tokenizer(root).encode(text, add_special_tokens=False)
        self.received: list[tuple[str, Any]] = []
        self.answer: Callable[[str, Any], tuple[int, str] | None] = lambda path, body: None

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The bodies of the requests for completions."""
        return [body for path, body in self.received if path == "/v1/completions"]

    @contextmanager
    def running(self):
        thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


@lru_cache
def tokenizer(root: str):
    """Loaded only where a server is joined: it takes seconds."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(root)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self._answered(None):
            return
        if self.path == "/health":
            self._send(200, "")
        elif self.path == "/v1/models":
            self._send(200, json.dumps({"data": self.server.models}))
        else:
            self._send(404, "")

    def do_POST(self):
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(text) if text else None
        if self.path != "/tokenize":
            self.server.received.append((self.path, body))
        if self._answered(body):
            return
        if self.path == "/tokenize":
            self._send(200, json.dumps({"tokens": self.server.tokenize(body["prompt"])}))
        elif self.path != "/v1/completions":
            self._send(200, json.dumps({"success": True}))
        else:
            # In some order: it is the index that says which is which.
            choices = [choice(body, index) for index in reversed(range(body["n"]))]
            self._send(200, json.dumps({"choices": choices}))

    def _answered(self, body) -> bool:
        answer = self.server.answer(self.path, body)
        if answer is None:
            return False
        status, text = answer
        if status == 0:  # hangs up
            self.close_connection = True
        else:
            self._send(status, text)
        return True

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode("utf-8"))))
        self.end_headers()
        self.wfile.write(text.encode("utf-8"))

    def log_message(self, *_):
        pass


def choice(body: dict[str, Any], index: int) -> dict[str, Any]:
    """A sample of three tokens, as vLLM would write it."""
    luck = random.Random(body["seed"] + index)
    token_ids = [luck.randrange(4096) for _ in range(3)]
    return {
        "index": index,
        "text": " ".join(map(str, token_ids)),
        "prompt_token_ids": body.get("prompt"),
        "token_ids": token_ids,
        "finish_reason": "stop",
        "logprobs": {"token_logprobs": [-luck.random() for _ in token_ids]},
    }


def main() -> None:
    """As vLLM's command is called; what it does not know, it is told and forgets."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int)
    parser.add_argument("--model")
    parser.add_argument("--served-model-name")
    known, others = parser.parse_known_args()
    print("a stub of vLLM:", *others, flush=True)
    StubVLLM(known.served_model_name, known.model, known.port).serve_forever()


def stand_in(folder, monkeypatch) -> Path:
    """A package vllm in the folder, which children import in place of the real one; returns its server's file."""
    package = folder / "packages/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "packages"), str(Path(__file__).parent)]))
    return package / "api_server.py"
