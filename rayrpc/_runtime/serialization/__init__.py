"""Objects to bytes and buffers, and back."""
