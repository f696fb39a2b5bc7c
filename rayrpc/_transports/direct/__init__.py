"""Connections between workers."""
