"""Kernels for CPUs: attention and sealing behind ops' names, in C++ that the user's compiler builds at first use."""
