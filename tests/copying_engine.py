"""An engine in this process that behaves as one in another process does: it has weights of its own, and it dies."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers.rollouts import EngineDeadError, Rollout, Sampling, TorchEngine


class CopyingEngine:
    """A `RolloutEngine`.  `deaths`: the calls over which it dies, such as ("generate", 3) for the third `generate`.

    `calls`: the names of all calls.  `sampled`: for each `generate` that was answered, a number that tells the weights
    apart that it sampled from, the prompts, and the sampling.  `keeps_weights`: it takes no others than the first.
    `shift` is added to all its log-probs.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        deaths: Collection[tuple[str, int]] = (),
        keeps_weights: bool = False,
        shift: float = 0.0,
    ):
        self.deaths, self.keeps_weights, self.shift = set(deaths), keeps_weights, shift
        self.calls: list[str] = []
        self.sampled: list[tuple[float, list[str], Sampling]] = []
        self.before_sampling = lambda: None
        self._is_sampling = False
        self._own = copy.deepcopy(policy)
        self._engine = TorchEngine(self._own, tokenizer)
        self._forget()

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[Rollout]:
        assert self._has_weights, "it was asked for samples before it had weights"
        self._call("generate")
        self.before_sampling()
        weights = fingerprint(self._own)
        self._is_sampling = True
        try:
            rollouts = self._engine.generate(prompts, sampling)
        finally:
            self._is_sampling = False
        self.sampled.append((weights, list(prompts), sampling))
        return [replace(r, completions=[self._shifted(c) for c in r.completions]) for r in rollouts]

    def sync_weights(self, policy: PreTrainedModel) -> None:
        assert not self._is_sampling, "new weights would change a batch half-way"
        self._call("sync_weights")
        if not (self._has_weights and self.keeps_weights):
            self._own.load_state_dict(policy.state_dict())
        self._has_weights = True

    def sleep(self) -> None:
        self._call("sleep")

    def restart(self) -> None:
        self._forget()
        self._call("restart")

    def close(self) -> None:
        self.calls.append("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if (name, self.calls.count(name)) in self.deaths:
            self._forget()
            raise EngineDeadError(f"it died in {name}\nthe last lines of its log")

    def _forget(self) -> None:
        self._has_weights = False
        for weight in self._own.parameters():
            weight.data.zero_()

    def _shifted(self, completion):
        return replace(completion, log_probs=[log_prob + self.shift for log_prob in completion.log_probs])


def fingerprint(model: PreTrainedModel) -> float:
    """Another number for other weights."""
    return sum(weight.double().pow(2).sum().item() for weight in model.parameters())
