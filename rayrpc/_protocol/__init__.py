"""The protocols of a group: pure, without I/O."""
