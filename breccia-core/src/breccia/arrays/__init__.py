"""Arrays of any framework: their framework, and the backend primitives that compute on them."""
