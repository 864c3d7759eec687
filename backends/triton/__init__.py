"""The torch backend: plain torch operations on any device; Triton kernels on CUDA."""
