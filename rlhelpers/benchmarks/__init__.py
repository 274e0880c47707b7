"""The supplement's four benchmarks: MMLU, GSM8K, AlpacaEval, SimpleSafetyTests."""
