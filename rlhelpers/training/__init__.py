"""One run: its configuration, its loop, its records."""
