"""HTTP to a vLLM server: health, models, completions of token ids, and the calls of a weight transfer."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import httpx

from rlhelpers.rollouts.engine import Completion, EngineDeadError
from rlhelpers.rollouts.vllm_settings import as_completion

SECONDS_FOR_AN_ANSWER = 3600  # a request may wait behind many others; a dead server is noticed at once
SECONDS_FOR_WEIGHTS = 300
REQUESTS_AT_A_TIME = 256


class VLLMClient:
    """`last_words` gives the end of the message when the server is gone."""

    def __init__(self, base_url: str, last_words: Callable[[], str] = lambda: ""):
        self.base_url, self.last_words = base_url, last_words
        # vLLM closes a connection after 5 idle seconds; a request sent at that moment would look like a death.
        limits = httpx.Limits(max_connections=REQUESTS_AT_A_TIME + 1, keepalive_expiry=1)
        # trust_env: a proxy of the environment would be asked for 127.0.0.1 too.
        self._http = httpx.Client(base_url=base_url, limits=limits, trust_env=False)
        self._sampling = self._closed = False

    def is_ready(self, seconds: float = 5) -> bool:
        """Return whether the server is healthy.  Raises ValueError where another program answers."""
        try:
            response = self._http.get("/health", timeout=seconds)
        except httpx.TransportError:
            return False
        if response.status_code == 404:
            raise ValueError(f"port: what answers at {self.base_url} is no vLLM server (it does not know /health)")
        return response.is_success

    def served_models(self) -> dict[str, dict[str, Any]]:
        """Return the server's description of each model, by the name that requests use."""
        try:
            models = self._http.get("/v1/models", timeout=30).raise_for_status().json()["data"]
            return {model["id"]: dict(model) for model in models}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"port: what answers at {self.base_url} is no vLLM server ({error})") from error

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the ids of a text by the server's own tokenizer, with no special tokens added."""
        answer = self._post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}, 30)
        return answer.get("tokens")

    def reset_prefix_cache(self) -> None:
        """Make the server forget all keys and values."""
        if not self._post("/reset_prefix_cache").get("success", True):
            raise EngineDeadError("the server did not forget the keys and values of the old weights")

    def complete(
        self,
        model: str,
        prompt_ids: Sequence[list[int]],
        requests: Sequence[Mapping[str, Any]],
        at_a_time: int = REQUESTS_AT_A_TIME,
    ) -> list[list[Completion]]:
        """Return the samples of each prompt.  Each prompt is a request, so that it has a seed of its own."""
        bodies = [
            {"model": model, "prompt": ids, "return_token_ids": True, **request}
            for ids, request in zip(prompt_ids, requests, strict=True)
        ]
        pool = ThreadPoolExecutor(min(at_a_time, REQUESTS_AT_A_TIME))
        self._sampling = True
        try:
            futures = [pool.submit(self._complete_one, body) for body in bodies]
            while wait(futures, 0.2, FIRST_EXCEPTION).not_done and not any(f.done() and f.exception() for f in futures):
                if self._closed:
                    raise EngineDeadError(f"the vLLM server was left while it sampled{self.last_words()}")
            for failed in (future for future in futures if future.done() and future.exception()):
                failed.result()  # raises
            return [future.result() for future in futures]
        finally:  # after an error or an interrupt, do not wait for the rest
            self._sampling = False
            pool.shutdown(wait=False, cancel_futures=True)

    def call_workers(self, method: str, **given: Any) -> None:
        """Make one of the four calls of vLLM's weight transfer; see `weight_sync`."""
        try:
            self._post(f"/{method}", given or None)
        except (ValueError, EngineDeadError) as error:
            if method != "init_weight_transfer_engine":
                raise
            remedy = "if it still holds the way of an earlier trainer, start the server again"
            raise EngineDeadError(f"no way for weights to {self.base_url}: {error}; {remedy}") from error

    def close(self) -> None:
        self._closed = True
        if not self._sampling:  # a socket that is closed under a thread that reads it may leave the thread waiting
            self._http.close()

    def _complete_one(self, body: Mapping[str, Any]) -> list[Completion]:
        answer = self._post("/v1/completions", body, SECONDS_FOR_AN_ANSWER)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if len(choices) != body.get("n", 1):
                raise RuntimeError(f"the vLLM server gave {len(choices)} samples of a prompt, not n={body.get('n', 1)}")
            return [_completion(choice, body) for choice in choices]
        except (KeyError, TypeError) as error:
            raise RuntimeError(
                f"the vLLM server gave an answer of another form: {error!r} in {answer!r:.200}"
            ) from error

    def _post(
        self, path: str, body: Mapping[str, Any] | None = None, seconds: float = SECONDS_FOR_WEIGHTS
    ) -> dict[str, Any]:
        """Return the answer.  Raises ValueError if the request is refused, EngineDeadError if the server is gone."""
        try:
            response = self._http.post(path, json=body, timeout=httpx.Timeout(seconds, connect=30, pool=None))
        except httpx.TimeoutException as error:
            limit = f"{path} was not answered within {seconds} s"
            raise EngineDeadError(f"the vLLM server hangs: {limit}{self.last_words()}") from error
        except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: this client was closed meanwhile
            raise EngineDeadError(f"the vLLM server does not answer: {error}{self.last_words()}") from error
        if response.status_code in (400, 404, 422):
            raise ValueError(f"the vLLM server refuses what {path} was given: {response.text}")
        if response.is_error:
            raise EngineDeadError(f"the vLLM server failed: {response.text[:500]}{self.last_words()}")
        try:
            return dict(response.json())
        except (ValueError, TypeError) as error:
            raise RuntimeError(f"the vLLM server answered {path} with no JSON object: {response.text[:200]}") from error


def _completion(choice: Mapping[str, Any], body: Mapping[str, Any]) -> Completion:
    """Return one choice of an answer.  Raises RuntimeError where other tokens would be scored than were sampled."""
    if choice["token_ids"] is None:
        raise TypeError("token_ids is None")
    if choice.get("prompt_token_ids", body["prompt"]) not in (body["prompt"], None):
        raise RuntimeError("the vLLM server read other token ids than the prompt's; one more in front is a second BOS")
    stop = choice.get("stop_reason")
    if body.get("include_stop_str_in_output") and isinstance(stop, str) and not choice["text"].endswith(stop):
        raise RuntimeError(f"the vLLM server cut the stop string {stop!r}, so that no response can have the format")
    return as_completion(
        choice["text"], choice["token_ids"], choice["finish_reason"], choice["logprobs"]["token_logprobs"]
    )
