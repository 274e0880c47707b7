"""HTTP to a vLLM server: is it there, what does it serve, and completions of token ids."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from rlhelpers.rollouts.engine import Completion, EngineDeadError
from rlhelpers.rollouts.vllm_settings import as_completion

SECONDS_FOR_AN_ANSWER = 3600  # a request may wait behind many others; a dead server is noticed at once
REQUESTS_AT_A_TIME = 64


class VLLMClient:
    """`last_words`: what to add to the message when the server is gone."""

    def __init__(self, base_url: str, last_words: Callable[[], str] = lambda: ""):
        self.base_url, self.last_words = base_url, last_words
        # vLLM closes a connection that was idle for 5 s; a request that crosses with that would look like a death.
        limits = httpx.Limits(max_connections=REQUESTS_AT_A_TIME + 1, keepalive_expiry=1)
        timeout = httpx.Timeout(SECONDS_FOR_AN_ANSWER, connect=30, pool=None)
        # No proxy: it would be asked for 127.0.0.1 too.
        self._http = httpx.Client(base_url=base_url, limits=limits, timeout=timeout, trust_env=False)

    def is_ready(self) -> bool:
        """Raises ValueError where something else answers, which will never be."""
        try:
            response = self._http.get("/health", timeout=5)
        except httpx.TransportError:
            return False
        if response.status_code == 404:
            raise ValueError(f"port: what answers at {self.base_url} is no vLLM server (it does not know /health)")
        return response.is_success

    def served_models(self) -> dict[str, str | None]:
        """The names by which they are asked for, and where each comes from."""
        try:
            models = self._http.get("/v1/models", timeout=30).raise_for_status().json()["data"]
            return {model["id"]: model.get("root") for model in models}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"port: what answers at {self.base_url} is no vLLM server ({error})") from error

    def reset_prefix_cache(self) -> None:
        """Forget all keys and values."""
        if not self._post("/reset_prefix_cache", None).get("success", True):
            raise EngineDeadError("the server did not forget the keys and values of the old weights")

    def complete(
        self,
        model: str,
        prompt_ids: Sequence[list[int]],
        requests: Sequence[Mapping[str, Any]],
        at_a_time: int = REQUESTS_AT_A_TIME,
    ) -> list[list[Completion]]:
        """The samples of each prompt.  One request for each: only so has each a seed of its own."""
        bodies = [
            {"model": model, "prompt": ids, "return_token_ids": True, **request}
            for ids, request in zip(prompt_ids, requests, strict=True)
        ]
        with ThreadPoolExecutor(min(at_a_time, REQUESTS_AT_A_TIME)) as pool:
            return list(pool.map(self._complete_one, bodies))

    def close(self) -> None:
        self._http.close()

    def _complete_one(self, body: Mapping[str, Any]) -> list[Completion]:
        choices = sorted(self._post("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
        if len(choices) != body.get("n", 1):
            raise RuntimeError(f"the vLLM server gave {len(choices)} samples of a prompt, not n={body.get('n', 1)}")
        return [
            as_completion(c["text"], c["token_ids"], c["finish_reason"], c["logprobs"]["token_logprobs"])
            for c in choices
        ]

    def _post(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """The answer.  Raises ValueError for a request that the server refuses, EngineDeadError when it is gone."""
        try:
            response = self._http.post(path, json=body)
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: this client was closed meanwhile
            raise EngineDeadError(f"the vLLM server does not answer: {error}{self.last_words()}") from error
        if response.status_code in (400, 404, 422):
            raise ValueError(f"sampling_params: the server refuses them: {response.text}")
        if response.is_error:
            raise EngineDeadError(f"the vLLM server failed: {response.text[:500]}{self.last_words()}")
        return response.json()
