"""Measurements: every figure in the docs is printed by a module here."""
