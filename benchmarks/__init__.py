"""Benchmarks: ratios against peers measured in the same run, appended to a CSV with the hardware named."""
