"""From a policy to completions: the engine protocol and its engines."""

from rlhelpers.rollouts.engine import Completion, EngineDeadError, Rollout, RolloutEngine, Sampling
from rlhelpers.rollouts.torch_engine import TorchEngine

__all__ = ["Completion", "EngineDeadError", "Rollout", "RolloutEngine", "Sampling", "TorchEngine"]
