"""A run's weights in a form that others load: adapter, merged, or quantized for serving."""
