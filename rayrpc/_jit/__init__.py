"""Tasks and awaitables."""
