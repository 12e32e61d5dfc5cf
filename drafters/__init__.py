"""Drafters: each file implements `spec.drafter.Drafter`. They know token ids and the target's scores, never scheduling."""
