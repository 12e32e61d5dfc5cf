"""Other engines measured beside ours: their environments, the scripts that drive them, the comparison and its table."""
