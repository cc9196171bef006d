"""From an op to the kernel that runs: plug-ins, the table, the facts of a call."""
