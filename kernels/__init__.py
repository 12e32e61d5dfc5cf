"""Numeric ops of Forespeak: one folder per op, holding its contract, a torch reference, a Triton and a native version."""
