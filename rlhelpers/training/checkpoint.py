"""Checkpoints: everything that decides how a run goes on after a step, each in a folder that is whole or not there.

step_00020/policy.safetensors   the weights
step_00020/state.pt             the optimizer's state, the global random states, and the batch that was sampled ahead
step_00020/state.json           the step, the configuration's fingerprint, and what the loop carries along
step_00020/SHA256SUMS           of the other three, as `sha256sum` writes it; written last

What a train step or an estimator of the reader's own keeps in variables between updates is not in it.
"""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhelpers.files import sha256, whole_folder
from rlhelpers.rollouts import Completion, Rollout

KEPT = 2  # the last one, and one more should that be damaged
WEIGHTS, STATE, FACTS, SUMS = "policy.safetensors", "state.pt", "state.json", "SHA256SUMS"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step`.

    carried: whatever the loop wants back, as JSON has it.
    ahead: the next step's rollouts, where they are sampled a step ahead; their weights exist no more.
    """

    step: int
    fingerprint: str
    carried: dict[str, Any]
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    randomness: dict[str, Any]
    ahead: list[Rollout] | None = None

    @classmethod
    def take(
        cls, step: int, fingerprint: str, carried: dict[str, Any], policy, optimizer, ahead: list[Rollout] | None
    ) -> Self:
        """Return the state of now.  It refers to the live weights and moments: save it before the next update."""
        weights = {name: weight.detach() for name, weight in policy.named_parameters()}
        randomness = _random_states(policy.device)
        return cls(step, fingerprint, carried, weights, optimizer.state_dict(), randomness, ahead)

    def save(self, folder: Path) -> None:
        """Write it to `folder`/step_..., then remove all but the last KEPT."""
        with whole_folder(folder / f"step_{self.step:05d}") as new:
            save_file({name: weight.contiguous() for name, weight in self.weights.items()}, new / WEIGHTS)
            ahead = None if self.ahead is None else [asdict(rollout) for rollout in self.ahead]
            state = {"optimizer": self.optimizer, "randomness": self.randomness, "ahead": ahead}
            torch.save(state, new / STATE)
            facts = {"step": self.step, "fingerprint": self.fingerprint, "carried": self.carried}
            (new / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            sums = "".join(f"{sha256(new / name)}  {name}\n" for name in (WEIGHTS, STATE, FACTS))
            (new / SUMS).write_text(sums, encoding="utf-8")
        for old in _folders(folder)[:-KEPT]:
            shutil.rmtree(old)

    def restore(self, policy, optimizer) -> None:
        """Load weights and moments.  Raises ValueError for a policy of other names, shapes or dtypes than the saved."""
        own = dict(policy.named_parameters())
        kinds, saved = ({n: f"{w.dtype} {tuple(w.shape)}" for n, w in ws.items()} for ws in (own, self.weights))
        if kinds != saved:
            name = next(n for n in kinds | saved if kinds.get(n) != saved.get(n))
            raise ValueError(
                f"resume: in the checkpoint {name} is {saved.get(name)}, in the policy on {policy.device} it is "
                f"{kinds.get(name)}; a run goes on with the model and on the kind of device that it was begun with"
            )
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(self.weights[name])
        optimizer.load_state_dict(self.optimizer)

    def restore_randomness(self, device: torch.device) -> None:
        """Load the states of the global generators of Python, numpy and torch."""
        random.setstate(self.randomness["python"])
        np.random.set_state(self.randomness["numpy"])
        torch.set_rng_state(self.randomness["torch"])
        if self.randomness["cuda"] is not None:
            torch.cuda.set_rng_state(self.randomness["cuda"], device)


def newest(folder: Path, fingerprint: str, remark: Callable[[str], None]) -> Checkpoint | None:
    """Return the last one that is whole and of this configuration.  remark: is told of each later one that is not."""
    for path in reversed(_folders(folder)):
        try:
            return _load(path, fingerprint)
        except (OSError, ValueError) as error:
            remark(f"The checkpoint {path.name} is not used: {error}")
    return None


def remove_later(folder: Path, step: int) -> None:
    """Remove the checkpoints after `step`."""
    for path in _folders(folder):
        if _step(path) > step:
            shutil.rmtree(path)


def _load(path: Path, fingerprint: str) -> Checkpoint:
    """Raises OSError or ValueError where something is missing, damaged, or of another configuration."""
    sums = dict(reversed(line.split()) for line in (path / SUMS).read_text(encoding="utf-8").splitlines())
    for name in (WEIGHTS, STATE, FACTS):
        if sums.get(name) != sha256(path / name):
            raise ValueError(f"{name} is not what was written")
    facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    if facts["fingerprint"] != fingerprint:
        raise ValueError("it is of another configuration")
    state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    if state["ahead"] is not None:
        rows = [row | {"completions": [Completion(**c) for c in row["completions"]]} for row in state["ahead"]]
        state["ahead"] = [Rollout(**row) for row in rows]
    return Checkpoint(weights=load_file(path / WEIGHTS), **facts, **state)


def _random_states(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _folders(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted((path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
