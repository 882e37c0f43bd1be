"""The published formats of drafters, each read into one description; drafter.py makes a checkpoint of it and the tensors."""
