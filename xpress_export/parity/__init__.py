"""Graph by graph and end to end against PyTorch references."""
