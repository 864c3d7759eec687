"""The Metal kernels of the MLX backend; the plain MLX version of each stands in kvarn.backends.mlx.ops."""
