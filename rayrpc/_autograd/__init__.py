"""Distributed autograd."""
