"""Target decoder, drafter, refiner and acceptance in PyTorch, on operators that export to single ONNX operators."""
