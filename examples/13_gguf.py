"""Write a GGUF file with K-quants, read its tensors with every code, and quantize them again under integers of any width.

The model is small and random, as no file is downloaded. Of your own file everything from `load_checkpoint` on is the same; on
the command line it is `breccia inspect model.gguf` and `breccia convert model.gguf folder --recipe none`. Writing GGUF needs
the library gguf: pip install 'breccia-bridges[gguf]'.

python examples/13_gguf.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

import breccia
from breccia.bridges import compare, convert, load_checkpoint, save_safetensors

HIDDEN, MIDDLE, VOCABULARY = 256, 512, 64
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def model(folder: Path) -> Path:
    """A folder of transformers with a Qwen3 of one layer."""
    rng, layer = np.random.default_rng(0), "model.layers.0."
    shapes = {
        f"{layer}self_attn.q_proj": (256, HIDDEN),
        f"{layer}self_attn.k_proj": (128, HIDDEN),
        f"{layer}self_attn.v_proj": (128, HIDDEN),
        f"{layer}self_attn.o_proj": (HIDDEN, 256),
        f"{layer}mlp.gate_proj": (MIDDLE, HIDDEN),
        f"{layer}mlp.up_proj": (MIDDLE, HIDDEN),
        f"{layer}mlp.down_proj": (HIDDEN, MIDDLE),
        "model.embed_tokens": (VOCABULARY, HIDDEN),
    }
    norms = {"model.norm": HIDDEN, f"{layer}input_layernorm": HIDDEN, f"{layer}post_attention_layernorm": HIDDEN}
    norms |= {f"{layer}self_attn.{x}_norm": 64 for x in "qk"}
    tensors = {f"{name}.weight": 0.02 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": np.ones(n, np.float32) for name, n in norms.items()}
    folder.mkdir()
    save_safetensors(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, file = model(folder / "model"), folder / "model-Q4_K.gguf"

        # Super-blocks of 256: a 6-bit scale and a 6-bit minimum for each 32 codes, under two FP16 numbers. llama.cpp loads it.
        convert(source, file, "q4_k", dialect="gguf")

        # Names are those of transformers, and values are read one by one.
        checkpoint = load_checkpoint(file)
        for name in list(checkpoint)[:4]:
            header = checkpoint.header(name)
            print(name, header.shape, header.dtype or header.recipe.spec)
        name = "model.layers.0.mlp.down_proj.weight"
        weight = checkpoint[name]
        print(f"{weight.recipe.spec}: {weight.nbytes} bytes, {8 * weight.nbytes / weight.size} bits per value")
        original = load_checkpoint(source)[name]
        again = breccia.cast(original, "q4_k")
        print("the file has the codes of a cast:", breccia.bytes_equal(weight, again))

        # A product takes the codes as they are.
        x = np.random.default_rng(1).standard_normal((2, MIDDLE)).astype(np.float32)
        y, exact = breccia.matmul(x, weight.mT), x @ breccia.dequantize(weight).T
        print("the product is that of the decoded weight:", np.allclose(y, exact, rtol=1e-4, atol=1e-4))

        # Integers of 1 to 8 bits, packed without gaps, beside K-quants.
        print("\nrecipe                                 bits  SQNR")
        for spec in (*(f"int,bits={n},group_size=32,offset=bias" for n in range(1, 9)), *(f"q{n}_k" for n in range(2, 7))):
            st = breccia.cast(original, spec)
            error = breccia.dequantize(st) - original
            sqnr = 10 * np.log10(np.square(original).sum() / np.square(error).sum())
            print(f"{spec:37} {8 * st.nbytes / st.size:5.2f}  {sqnr:4.1f}")

        # The codes in a folder of safetensors, with the same values; and the file under other recipes, layer by layer.
        convert(file, folder / "kept", "none")
        print("\n" + compare(file, folder / "kept").verdict)
        policy = {"*down_proj*": "q6_k", "*": "int,bits=5,group_size=32"}
        convert(file, folder / "mixed.gguf", policy, dialect="gguf")
        mixed = load_checkpoint(folder / "mixed.gguf")
        print(*(f"{n.rpartition('.')[0]}: {mixed.header(n).recipe.spec}" for n in mixed if "mlp" in n), sep="\n")
        del checkpoint, weight, mixed  # the mappings, before their files go


if __name__ == "__main__":
    main()
