"""Many runs: read from their folders, compared, drawn.  Imports nothing that trains."""
