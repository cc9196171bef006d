"""Products of other libraries as kernels of the table: humming-kernels, torch's INT4, DeepGEMM, TransformerEngine."""
