"""Worker processes: the parent's side. The child's side is in `child`."""
