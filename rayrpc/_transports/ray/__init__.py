"""Calls by Ray actors."""
