"""From a policy to completions: the engine protocol and its engines."""

from rlhelpers.rollouts.engine import Completion, Rollout, RolloutEngine, Sampling
from rlhelpers.rollouts.torch_engine import TorchEngine

__all__ = ["Completion", "Rollout", "RolloutEngine", "Sampling", "TorchEngine"]
