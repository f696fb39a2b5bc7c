"""Starting workers: ranks of a script, and servers for a notebook, as Ray actors."""
