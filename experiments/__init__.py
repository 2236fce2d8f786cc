"""Runnable modules, one per job: `python -m experiments.train`, `.evaluate`, `.export`, `.doctor`, `.make_tiny`, `.bench`."""
