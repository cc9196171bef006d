"""Less error in the same bytes: scales searched for the columns that count, and rotations. Then a LoRA adapter is merged in.

python examples/14_same_bytes.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import breccia
from breccia.bridges import convert, merge

LAYER = "model.layers.0.mlp.up_proj"


def save_adapter(folder: Path, change: tuple[np.ndarray, np.ndarray]) -> None:
    """An adapter as PEFT writes it: the change of the layer is lora_alpha / r times B @ A."""
    folder.mkdir()
    a, b = change
    save_file(
        {f"base_model.model.{LAYER}.lora_A.weight": a, f"base_model.model.{LAYER}.lora_B.weight": b},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": len(a), "lora_alpha": len(a)}))


def main() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((256, 256), dtype=np.float32)
    inputs = rng.standard_normal((512, 256), dtype=np.float32) * np.exp(rng.standard_normal(256, dtype=np.float32))

    def error(st: breccia.ScaledTensor) -> float:
        """The mean squared error of what the layer returns."""
        return float(np.square(inputs @ (breccia.dequantize(st) - weight).T).mean())

    # Errors of a column count as much as its inputs are large: their mean square is the importance.
    importance = np.square(inputs).mean(0)
    plain = breccia.cast(weight, "nvfp4")
    searched = breccia.cast(weight, "nvfp4,scale_rule=mse")
    weighed = breccia.cast(weight, "nvfp4,scale_rule=mse", importance=importance)
    print(f"error of outputs: {error(plain):.1f} plain, {error(searched):.1f} searched, {error(weighed):.1f} by importance")
    print("importance lowers it at the same bytes:", error(weighed) < error(searched) and weighed.nbytes == plain.nbytes)

    # Outliers take the steps of their blocks. A rotation spreads each over 64 numbers; decoding undoes it.
    weight[:, ::64] *= 20
    plain, rotated = breccia.cast(weight, "int4"), breccia.cast(weight, "int4,rotation=64")
    errors = [float(np.square(breccia.dequantize(st) - weight).mean()) for st in (plain, rotated)]
    print(f"with outliers, INT4: {errors[0]:.3f} plain, {errors[1]:.3f} rotated")
    print("the rotation helps at the same bytes:", errors[1] < errors[0] and rotated.nbytes == plain.nbytes)

    # An adapter becomes part of the codes. Less than 90 % of its change left would be refused; so would, with
    # calibrate=TEXT (a model of transformers), less than 90 % of its effect on the outputs.
    with tempfile.TemporaryDirectory() as temporary:
        model, quantized, merged, adapter = (Path(temporary, name) for name in ("model", "quantized", "merged", "adapter"))
        model.mkdir()
        save_file({f"{LAYER}.weight": rng.standard_normal((256, 256), dtype=np.float32)}, model / "model.safetensors")
        convert(model, quantized, "nvfp4")
        save_adapter(
            adapter, (rng.standard_normal((8, 256), dtype=np.float32), rng.standard_normal((256, 8), dtype=np.float32) / 8)
        )
        report = merge(quantized, adapter, merged)
        print(f"merged: {100 * report.share:.1f} % of the change survives; {report.error:.2f} of its norm is rounded otherwise")
        print("the adapter survives in the same format:", report.share > 0.9 and report.tensors[0].stored_as == "nvfp4")


if __name__ == "__main__":
    main()
