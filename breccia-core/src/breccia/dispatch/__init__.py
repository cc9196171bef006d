"""From an op to the kernel that runs: plug-ins, the dispatch table, the facts of a call."""
