"""transformers: `from_pretrained` of converted folders, quantizing after loading, and `save_pretrained`.

Importing this package registers the quantization method "breccia" with transformers, and quantized layers with peft, if it is
installed.

    import breccia_torch.hf
    model = AutoModelForCausalLM.from_pretrained("llama-nvfp4")  # written by `breccia convert`

    from breccia_torch.hf import BrecciaConfig
    model = AutoModelForCausalLM.from_pretrained("llama", quantization_config=BrecciaConfig("nvfp4"))
"""

import logging
from importlib.util import find_spec

try:
    from .quantizer import BrecciaConfig as BrecciaConfig
    from .quantizer import BrecciaHfQuantizer as BrecciaHfQuantizer
    from .quantizer import attach as attach
except ImportError as e:
    wrong = f"breccia_torch.hf needs transformers 5.23 or newer: pip install 'breccia-torch[hf]' ({e})."
    raise ImportError(wrong, name=e.name, path=e.path) from e

if find_spec("peft") is not None:
    try:
        from . import lora as lora
    except Exception as e:  # a library that peft imports may raise anything
        logging.getLogger(__name__).warning(
            "peft is installed and cannot be imported, so that it does not know quantized layers: %s: %s", type(e).__name__, e
        )

__all__ = ["BrecciaConfig", "BrecciaHfQuantizer", "attach"]
