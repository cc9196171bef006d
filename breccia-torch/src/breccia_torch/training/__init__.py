"""Training in low precision: layers whose three GEMMs multiply quantized operands, and the conversion of models to them.

`linear` is the layer, `experts` that of mixtures of experts, `layer` what they share, `operands` their casts, `state` what
lives from step to step, `graphs` what compilers see, and `convert` has `convert_to_training_`.
"""
