"""RRefs of one worker."""
