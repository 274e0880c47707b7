"""Many runs: grids of parameters, what is there already, and the processes that run the rest."""
