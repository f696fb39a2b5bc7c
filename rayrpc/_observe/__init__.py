"""What can be seen of calls."""
