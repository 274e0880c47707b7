"""What the reader of a notebook touches."""
