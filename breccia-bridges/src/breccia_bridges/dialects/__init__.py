"""How other libraries store quantized values in checkpoints: one module for each library; `declared` lists them."""
