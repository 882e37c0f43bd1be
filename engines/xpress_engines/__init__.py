"""ONNX graphs → TensorRT engines. Needs neither torch nor transformers."""
