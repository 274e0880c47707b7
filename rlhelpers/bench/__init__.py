"""Speeds and memory, measured side by side in one run after what is compared was shown to compute the same thing."""
