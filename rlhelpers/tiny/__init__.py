"""The embedded world: its problems, the corpus that the base model learned from, and the model."""
