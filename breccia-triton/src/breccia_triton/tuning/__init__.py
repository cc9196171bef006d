"""What was measured on devices, and what follows from it: choices of kernels, and estimates of times."""
