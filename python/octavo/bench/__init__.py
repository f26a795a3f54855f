"""Measurements of octavo, each beside what the machine could do at most."""
