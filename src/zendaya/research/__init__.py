"""Experiments with the library: recipes, sweeps, reports and benchmarks."""
