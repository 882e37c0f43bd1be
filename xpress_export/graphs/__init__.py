"""One module per exported graph: its inputs, outputs and dynamic dims; the exporter and the shared weights file."""
