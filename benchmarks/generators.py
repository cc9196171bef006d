"""Programs that generate tokens with the model of a GGUF file, for bench_generation.py. Each has a process of its own.

llama.cpp runs where BRECCIA_LLAMA names a folder with libllama, libggml and their backends for CPUs, such as `bins/linux-x64`
of the npm package @node-llama-cpp/linux-x64.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = "BRECCIA_LLAMA"


class Generated(NamedTuple):
    """Tokens after the prompt, seconds until the first, and seconds of each further one."""

    tokens: list[int]
    prompt_s: float
    step_s: float


class Generator(NamedTuple):
    """generate: greedily, from token ids and a number of steps. layers: one call of each linear layer, with one row."""

    generate: Callable[[list[int], int], Generated]
    layers: Callable[[], object] | None
    model_bytes: int


# -- transformers ----------------------------------------------------------------------------------------------------


def decoded(file: Path, dtype: str) -> Any:
    """The model as transformers decodes it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)


def quantized(file: Path, **options: Any) -> Any:
    """The model whose layers hold the codes of the file. options: of `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    from breccia_torch.hf import BrecciaConfig

    config = BrecciaConfig()
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, quantization_config=config, **options)


def in_transformers(model: Any, compiled: bool = False) -> Generator:
    """Through `generate`. compiled: one compiled graph for every token after the first, with a cache of fixed size.

    Layers of one length have the same row, as those that share a row have in the model.
    """
    import torch
    from bench_decoder import Clock, layers_of

    model = model.eval().requires_grad_(False)
    if compiled:
        model.generation_config.cache_implementation = "static"
        model.generation_config.compile_config = _of_cpus()
    model.generation_config.eos_token_id = None  # all generate as many tokens
    linear = layers_of(model)
    rows = {k: torch.randn(1, 1, k, dtype=model.dtype) for k in {layer.in_features for layer in linear}}
    stored = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}

    def generate(prompt: list[int], steps: int) -> Generated:
        ids = torch.tensor([prompt])
        given = {"max_new_tokens": 1 + steps, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        clock, start = Clock(), time.perf_counter()
        with torch.no_grad():
            (found,) = model.generate(ids, streamer=clock, **given)
        _, first, *_, last = clock.times  # the prompt, the first token, the last token
        return Generated(found[len(prompt) :].tolist(), first - start, (last - first) / steps)

    def layers() -> None:
        with torch.no_grad():
            for layer in linear:
                layer(rows[layer.in_features])

    return Generator(generate, layers, sum(stored.values()))


#: For Inductor. Thresholds: the sines of a position are computed once for all layers.
_INDUCTOR = {"size_asserts": False, "realize_reads_threshold": 1, "realize_opcount_threshold": 5}


def _of_cpus() -> Any:
    """How `generate` compiles, which it leaves out on a CPU unless told. No call checks that modules are as before."""
    import torch
    from transformers import CompileConfig

    options = {
        "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
        "cpp_wrapper": True,  # one function in C++ calls the kernels of a graph
        **_INDUCTOR,
    }
    config: Any = CompileConfig(fullgraph=True, mode=None, options=options)  # pyright: ignore
    config._compile_all_devices = True
    return config


def ahead_of_time(model: Any) -> Generator:
    """A step as a program of AOTInductor, which has no Python, and the prompt by the model, with one cache for both."""
    import torch

    generator = in_transformers(model)
    model.generation_config.cache_implementation = "static"
    steps_of: dict[int, tuple[Any, Any]] = {}

    def generate(prompt: list[int], steps: int) -> Generated:
        length = len(prompt) + steps
        if length not in steps_of:
            steps_of[length] = _step_of(model, length)
        cache, step = steps_of[length]
        cache.reset()
        start = time.perf_counter()
        with torch.no_grad():
            output = model(torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = [int(output.logits[0, -1].argmax())]
        first = time.perf_counter()
        for at in range(len(prompt), length):
            logits = step(input_ids=torch.tensor([tokens[-1:]]), cache_position=torch.tensor([at]))
            tokens.append(int(logits[0, -1].argmax()))
        return Generated(tokens, first - start, (time.perf_counter() - first) / steps)

    return generator._replace(generate=generate)


def _step_of(model: Any, length: int) -> tuple[Any, Any]:
    """A cache for `length` tokens, and the program of a token, which uses the tensors of the model and the cache."""
    import torch
    import torch._inductor
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    module = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=length)
    token = {"input_ids": torch.tensor([[0]]), "cache_position": torch.tensor([0])}
    with torch.no_grad():
        program = torch.export.export(module, (), token, strict=True)
    with tempfile.TemporaryDirectory() as folder:
        options = {**_INDUCTOR, "aot_inductor.package_constants_in_so": False}
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(Path(folder) / "step.pt2"), inductor_configs=options
        )
        step = torch._inductor.aoti_load_package(package)
    own = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    tensors = {**program.constants, **dict(own)}
    step.load_constants({name: tensors[name] for name in step.get_constant_fqns()}, check_full_update=True, user_managed=True)
    return module.static_cache, step


# -- llama.cpp -------------------------------------------------------------------------------------------------------


class _Parameters(ctypes.Structure):
    """Those of a model or a context. It is larger than theirs, which the library passes in memory, so the rest is unused."""

    _fields_ = (("words", ctypes.c_int32 * 256),)


class _Batch(ctypes.Structure):
    _fields_ = (("words", ctypes.c_int64 * 7),)


#: By default, the first words of the parameters of a context, tokens of the context first, and its two counts of threads.
_DEFAULTS, _THREADS = [512, 2048, 512, 1], [4, 4]


def llama_version() -> str | None:
    """The version in the name of libllama, if llama.cpp is there and its name has one."""
    found = re.search(r"libllama\.(\S+?)\.so", " ".join(os.listdir(os.environ.get(FOLDER, os.curdir))))
    return found and found[1]


class LlamaCpp:
    """llama.cpp's own model of a file, with its defaults: weights repacked for this processor, the cache in FP16.

    size: bytes of its weights.
    """

    def __init__(self, file: Path, threads: int) -> None:
        folder = Path(os.environ[FOLDER])
        _, ggml, llama = (
            ctypes.CDLL(str(next(folder.glob(f"lib{name}.*so"))), mode=ctypes.RTLD_GLOBAL)  # a version may come before "so"
            for name in ("ggml-base", "ggml", "llama")
        )

        def function(name: str, result: Any, *arguments: Any, library: Any = llama) -> Any:
            found = getattr(library, name)
            found.restype, found.argtypes = result, arguments
            return found

        pointer, whole = ctypes.c_void_p, ctypes.c_int32
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda level, text, data: None)
        function("llama_log_set", None, type(self._quiet), pointer)(self._quiet, None)
        function("ggml_backend_load_all_from_path", None, ctypes.c_char_p, library=ggml)(os.fsencode(folder))
        of_model = function("llama_model_default_params", _Parameters)()
        model = function("llama_model_load_from_file", pointer, ctypes.c_char_p, _Parameters)(os.fsencode(file), of_model)
        parameters = function("llama_context_default_params", _Parameters)()
        words = list(parameters.words)
        counts = next((at for at in range(4, 16) if words[at : at + 2] == _THREADS), None)
        if words[:4] != _DEFAULTS or counts is None or not model:
            raise RuntimeError(f"{folder} has another version of llama.cpp than this script knows, or cannot read {file.name}")
        parameters.words[0] = 2048
        parameters.words[counts] = parameters.words[counts + 1] = threads
        self._context = function("llama_init_from_model", pointer, pointer, _Parameters)(model, parameters)
        self._memory = function("llama_get_memory", pointer, pointer)(self._context)
        self._clear = function("llama_memory_clear", None, pointer, ctypes.c_bool)
        self._batch = function("llama_batch_get_one", _Batch, pointer, whole)
        self._decode = function("llama_decode", whole, pointer, _Batch)
        self._logits = function("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), pointer, whole)
        vocabulary = function("llama_model_get_vocab", pointer, pointer)(model)
        self._tokens = function("llama_vocab_n_tokens", whole, pointer)(vocabulary)
        self.size: int = function("llama_model_size", ctypes.c_uint64, pointer)(model)

    def clear(self) -> None:
        """Forget all tokens."""
        self._clear(self._memory, True)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """FP32 logits after more tokens; the library's own memory, until the next call."""
        ids = np.array(tokens, np.int32)
        if status := self._decode(self._context, self._batch(ids.ctypes.data, len(ids))):
            raise RuntimeError(f"llama_decode returned {status}")
        return np.ctypeslib.as_array(self._logits(self._context, -1), (self._tokens,))


def in_llama_cpp(file: Path, threads: int) -> Generator:
    """By llama.cpp."""
    model = LlamaCpp(file, threads)

    def generate(prompt: list[int], steps: int) -> Generated:
        model.clear()
        start = time.perf_counter()
        tokens = [int(model.logits(prompt).argmax())]
        first = time.perf_counter()
        for _ in range(steps):
            tokens.append(int(model.logits(tokens[-1:]).argmax()))
        return Generated(tokens, first - start, (time.perf_counter() - first) / steps)

    return Generator(generate, None, model.size)


# -- arms ------------------------------------------------------------------------------------------------------------

OURS, COMPILED, ROUNDED, BOTH = "breccia", "breccia compiled", "breccia INT8", "breccia INT8 compiled"
AHEAD, BOTH_AHEAD = "breccia ahead of time", "breccia INT8 ahead of time"
FP32, BF16, LLAMA = "FP32", "BF16", "llama.cpp"
#: The kernel that rounds activations to INT8, as llama.cpp does, and the arms that prefer it.
PREFERRED, PREFERRING = "torch.cpu.matmul_int8", (ROUNDED, BOTH, BOTH_AHEAD)
#: Of compiled models: Inductor fuses the parts of this attention.
ATTENTION = {"attn_implementation": "eager"}
ARMS: dict[str, Callable[[Path, int], Generator]] = {
    OURS: lambda file, threads: in_transformers(quantized(file)),
    COMPILED: lambda file, threads: in_transformers(quantized(file, **ATTENTION), compiled=True),
    ROUNDED: lambda file, threads: in_transformers(quantized(file)),
    BOTH: lambda file, threads: in_transformers(quantized(file, **ATTENTION), compiled=True),
    AHEAD: lambda file, threads: ahead_of_time(quantized(file, **ATTENTION)),
    BOTH_AHEAD: lambda file, threads: ahead_of_time(quantized(file, **ATTENTION)),
    FP32: lambda file, threads: in_transformers(decoded(file, "float32")),
    BF16: lambda file, threads: in_transformers(decoded(file, "bfloat16")),
    LLAMA: in_llama_cpp,
}
#: The generator of this process.
CURRENT: list[Generator] = []


def opened(arm: str, file: str, threads: int) -> int:
    """Load the model of the file for an arm, and return the bytes of its weights."""
    if arm in PREFERRING:
        os.environ["BRECCIA_PREFER"] = PREFERRED  # breccia reads it when it is first used
    if arm != LLAMA:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
    CURRENT[:] = [ARMS[arm](Path(file), threads)]
    return CURRENT[0].model_bytes


def prompt_of(file: str, text: str, count: int) -> list[int]:
    """The first tokens of a text, by the tokenizer of the file."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(Path(file).parent, gguf_file=Path(file).name)
    return tokenizer(text).input_ids[:count]


def generated(prompt: list[int], steps: int) -> Generated:
    return CURRENT[0].generate(prompt, steps)


def layers_s() -> float | None:
    """Seconds of one call of each linear layer. Two calls before it are not counted: layers keep what repeats a product."""
    if (layers := CURRENT[0].layers) is None:
        return None
    for _ in range(2):
        layers()
    start = time.perf_counter()
    layers()
    return time.perf_counter() - start
