"""Groups to columns to packed micro-batches, and the backends that train on them."""
