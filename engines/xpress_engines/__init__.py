"""ONNX graph sets → TensorRT engines: profiles, checks on the parsed network, and one builder for every kind of engine.

    from xpress_engines.builder import build_engines
    from xpress_engines.profiles import load_profile

Knows nothing about torch, checkpoints or bundles' other contents; importing it loads nothing heavy.
"""
