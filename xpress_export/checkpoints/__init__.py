"""Published checkpoint formats, read into one description and named tensors."""
