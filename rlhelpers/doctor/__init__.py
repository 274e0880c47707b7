"""Can this machine do it: what it has, what a run needs, and what to change."""
