"""The conformance kit: the oracle that judges every backend (the rest of the kit builds upon it)."""
