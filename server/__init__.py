"""Strings, sockets and processes around the engine."""
