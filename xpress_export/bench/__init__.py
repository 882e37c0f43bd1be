"""The experiment: modes of one bundle measured against each other on sets of prompts, and the report about it.

Needs neither torch nor onnx: it runs wherever the runtime does.
"""
