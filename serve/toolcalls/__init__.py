"""Calls of functions and thoughts in a model's own format: learned from its chat template, found in its answers."""
