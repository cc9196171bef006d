"""transformers: `from_pretrained` of quantized folders, quantizing after loading, and `save_pretrained`.

Importing this package registers the quantization method "breccia" with transformers, and quantized layers with peft, if it is
installed.

    import breccia_torch.hf
    model = AutoModelForCausalLM.from_pretrained("llama-nvfp4")  # written by `breccia convert`

    from breccia_torch.hf import BrecciaConfig
    model = AutoModelForCausalLM.from_pretrained("llama", quantization_config=BrecciaConfig("nvfp4"))

A folder that another library quantized loads without it, every code as stored. transformers refuses another method than that of
the folder's config, which is loaded without it for that:

    config = AutoConfig.from_pretrained("llama-gptq", quantization_config=None)
    model = AutoModelForCausalLM.from_pretrained("llama-gptq", config=config, quantization_config=BrecciaConfig())

So does a GGUF file, of which transformers makes the config:

    file = {"gguf_file": "llama-Q4_K_M.gguf"}
    model = AutoModelForCausalLM.from_pretrained("llama-gguf", **file, quantization_config=BrecciaConfig())
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
