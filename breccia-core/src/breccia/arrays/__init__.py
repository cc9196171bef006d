"""Arrays of any framework: whose they are, and the backend primitives that compute on them."""
