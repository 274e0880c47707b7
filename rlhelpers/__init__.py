"""Reinforcement learning for reasoning language models: the package behind the workbook."""

__version__ = "0.1.0"
