"""transformers: `from_pretrained` of converted folders, quantizing after loading, and `save_pretrained`.

Importing this package registers the quantization method "breccia" with transformers.

    import breccia_torch.hf
    model = AutoModelForCausalLM.from_pretrained("llama-nvfp4")  # written by `breccia convert`

    from breccia_torch.hf import BrecciaConfig
    model = AutoModelForCausalLM.from_pretrained("llama", quantization_config=BrecciaConfig("nvfp4"))
"""

try:
    from .quantizer import BrecciaConfig as BrecciaConfig
    from .quantizer import BrecciaHfQuantizer as BrecciaHfQuantizer
    from .quantizer import attach as attach
except ImportError as e:
    wrong = f"breccia_torch.hf needs transformers 5.23 or newer: pip install 'breccia-torch[hf]' ({e})."
    raise ImportError(wrong, name=e.name, path=e.path) from e

__all__ = ["BrecciaConfig", "BrecciaHfQuantizer", "attach"]
