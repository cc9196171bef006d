"""ScaledTensor and its geometry: components, blocks, storages, structural ops."""
