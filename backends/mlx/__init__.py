"""The MLX backend: plain MLX operations on the CPU and on Metal; Metal kernels come under the same names."""
