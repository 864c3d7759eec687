"""Triton kernels of the CUDA backend; the plain torch version of each stands in kvarn.backends.triton.ops."""
