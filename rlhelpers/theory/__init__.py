"""What estimators do, three ways: derived (symbolic), summed over all cases (enumeration), sampled (montecarlo)."""
