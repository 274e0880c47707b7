"""What surrounds a notebook: its parameters, the papermill command, the edition without solutions, the write-up."""
