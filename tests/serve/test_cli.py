"""The command line: what stands on standard output, what on standard error, and the exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvarn.serve.cli import main

FLOAT32 = ["--dtype", "float32", "--device", "cpu", "--backend", "triton"]


def kvarn(*args: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def answer(demo_dir: Path, *args: object, stdin: str | None = None) -> Result:
    result = kvarn("run", demo_dir, *args, *FLOAT32, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result


def test_the_answer_alone_is_on_standard_output(demo_dir: Path) -> None:
    result = answer(demo_dir, "What is the capital of France?", "-n", 12)
    assert result.stdout == "The capital of France is Paris.\n"
    lines = result.stderr.splitlines()
    assert all(line.startswith("kvarn: ") for line in lines)
    assert "30 of 30 layers sealed" in lines[0]
    assert "disk cache" in lines[1]
    assert "weights 513.1 MiB" in lines[2]
    assert "exact would take 360.0 MiB" in lines[2]
    assert "prompt 37 tokens" in lines[-1]
    assert "KV held" in lines[-1]


def test_json_prints_one_object_with_every_field(demo_dir: Path) -> None:
    result = answer(demo_dir, "Count to three.", "-n", 9, "--json")
    got = json.loads(result.stdout)
    assert got["finish_reason"] == "length"
    assert got["usage"] == {"prompt_tokens": 34, "cached_tokens": 0, "completion_tokens": 9}
    assert got["text"]
    assert got["kv"]["dtype"] == "kvarn_k4v2_g128"
    assert (got["kv"]["layers_sealed"], got["kv"]["layers"]) == (30, 30)
    assert got["kv"]["bytes_exact"] == (34 + 8) * 30 * 2 * 3 * 64 * 4
    assert got["kv"]["bytes_held"] == 30 * 2 * 3 * 128 * 64 * 4
    assert (got["backend"], got["device"]) == ("triton", "cpu")
    assert {"load_s", "prompt_s", "decode_s", "prompt_tokens_per_s", "decode_tokens_per_s"} <= set(got["timing"])
    assert got["memory"]["peak_bytes"] > got["memory"]["weight_bytes"] > 500_000_000


def test_a_long_prompt_holds_the_bytes_of_the_formula(demo_dir: Path) -> None:
    prompt = "word " * 700
    got = json.loads(answer(demo_dir, prompt, "--raw", "-n", 1, "--json").stdout)
    tokens = got["usage"]["prompt_tokens"]
    sealed = tokens // 128 - 1
    assert sealed >= 3
    slots = 2 * 30 * 2 * 3 * 128 * 64 * 4
    assert got["kv"]["bytes_held"] == sealed * 30 * 3 * (57 * 128 + 1) + slots
    exact = json.loads(answer(demo_dir, prompt, "--raw", "-n", 1, "--json", "--kv-cache-dtype", "exact").stdout)
    assert exact["kv"]["bytes_held"] == -(-tokens // 128) * 128 * 30 * 2 * 3 * 64 * 4
    assert exact["kv"]["layers_sealed"] == 0


def test_the_prompt_comes_from_the_argument_the_option_a_file_or_standard_input(demo_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Say hi")
    same = [
        answer(demo_dir, "Say hi", "-n", 3).stdout,
        answer(demo_dir, "-p", "Say hi", "-n", 3).stdout,
        answer(demo_dir, "-f", file, "-n", 3).stdout,
        answer(demo_dir, "-n", 3, stdin="Say hi").stdout,
    ]
    assert len(set(same)) == 1


def test_a_schema_in_a_file_binds_the_answer(demo_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "cat.json"
    file.write_text('{"type": "object", "properties": {"age": {"type": "integer", "maximum": 30}}, "required": ["age"],'
                    ' "additionalProperties": false}')  # fmt: skip
    got = json.loads(answer(demo_dir, "Describe a cat as JSON.", "-n", 40, "--json-schema", file).stdout)
    assert list(got) == ["age"]
    assert got["age"] <= 30


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[1]", "must be an object"),
        ('{"uniqueItems": true}', "uniqueItems"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    tmp_path: Path, content: str | None, words: str
) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content)
    result = kvarn("run", tmp_path / "no-model", "hi", "--json-schema", file)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_seed_repeats_a_random_answer_and_another_seed_does_not(demo_dir: Path) -> None:
    hot = ["Tell me a story", "--temp", 1.5, "-n", 12]
    first = answer(demo_dir, *hot, "--seed", 1).stdout
    assert answer(demo_dir, *hot, "--seed", 1).stdout == first
    assert answer(demo_dir, *hot, "--seed", 2).stdout != first


def test_raw_leaves_the_chat_template_out_and_says_that_a_system_prompt_is_unused(demo_dir: Path) -> None:
    result = answer(demo_dir, "The capital of France is", "--raw", "-s", "ignored", "-n", 2, "--json")
    assert json.loads(result.stdout)["usage"]["prompt_tokens"] == 5
    assert "--system is not used" in result.stderr


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["hi", "--kv-cache-dtype", "q4_0"], 2, "unknown KV cache dtype 'q4_0'; use kvarn"),
        (["hi", "--kv-cache-dtype", "kvarn_k7v2_g128"], 2, "key width of 7 bits is not one of 2, 3, 4, 5, 6, 8"),
        (["hi", "--backend", "cuda"], 2, "unknown backend 'cuda'"),
        (["hi", "--dtype", "int8"], 2, "unknown dtype 'int8'"),
        (["hi", "--device", "cuda:77"], 1, "device 'cuda:77' cannot be used"),
        (["hi", "-c", "9000"], 2, "--ctx-size 9000 is not between 1 and the model's context of 8192"),
        (["hi", "-c", "20"], 1, "leaves no room to answer in a context of 20"),
        (["hi", "--temp", "-1"], 2, "temperature -1.0"),
        (["hi", "--top-p", "0"], 2, "top_p 0.0"),
        (["hi", "-p", "ho"], 2, "given more than once"),
        (["-f", "/no/such/file"], 2, "/no/such/file cannot be read"),
        (["hi", "-n", "0"], 2, "-n"),
    ],
)
def test_bad_input_is_one_clear_line_and_its_exit_code(demo_dir: Path, args: list[str], code: int, text: str) -> None:
    result = kvarn("run", demo_dir, *args)
    assert result.exit_code == code
    assert result.stdout == ""
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_an_empty_prompt_is_refused(demo_dir: Path) -> None:
    result = kvarn("run", demo_dir, stdin="")
    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr


def test_a_missing_model_is_exit_code_1_and_names_the_choices() -> None:
    result = kvarn("run", "no-such-model", "hi")
    assert result.exit_code == 1
    assert "use demo, a folder with config.json, or org/name" in result.stderr


def test_ppl_prints_the_figures_and_the_cache_is_close_to_exact(demo_dir: Path, tmp_path: Path) -> None:
    """The gate of every later change: a regression of the format or of attention shows here first."""
    file = tmp_path / "text.txt"
    root = Path(__file__).resolve().parents[2]
    file.write_text("".join((root / name).read_text() for name in ("README.md", "docs/format.md")))
    result = kvarn("ppl", demo_dir, file, "--against", "exact", "-n", 700, "-c", 700, "--json", *FLOAT32)
    assert result.exit_code == 0, result.stderr
    got = json.loads(result.stdout)
    assert got["tokens"] == 699
    assert got["bits_per_value"] == pytest.approx(57 * 8 / 128)
    assert 1 < got["ppl"] < 100
    assert got["buckets"][0]["kl_mean"] < 1e-6, "tiles 0 and 1 are read exactly by their own queries"
    assert 1e-4 < got["kl_mean"] < 0.03
    assert got["kl_median"] < got["kl_p99"]
    assert 0.85 < got["top1"] < 1


def test_ppl_of_exact_against_itself_is_nothing(demo_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    args = ["--against", "exact", "--kv-cache-dtype", "exact", "-n", 200, "--json", *FLOAT32]
    got = json.loads(kvarn("ppl", demo_dir, file, *args).stdout)
    assert got["kl_mean"] == 0
    assert got["top1"] == 1


def test_ppl_refuses_what_it_cannot_score(demo_dir: Path, tmp_path: Path) -> None:
    result = kvarn("ppl", demo_dir, tmp_path / "missing.txt")
    assert result.exit_code == 2
    assert "missing.txt cannot be read" in result.stderr
    (tmp_path / "one.txt").write_text("a")
    result = kvarn("ppl", demo_dir, tmp_path / "one.txt")
    assert result.exit_code == 2
    assert "at least 2" in result.stderr


def test_pull_prints_the_folder(demo_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_CACHE", str(demo_dir.parent.parent))
    result = kvarn("pull", "demo")
    assert result.exit_code == 0
    assert Path(result.stdout.strip()) == demo_dir


def test_help_is_instant_and_imports_no_framework() -> None:
    code = (
        "import sys; from kvarn.serve.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'mlx', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.rstrip().endswith("[]")


def test_the_readme_names_no_option_that_does_not_exist() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    for line in readme.splitlines():
        words = line.strip().removeprefix("$ ").split()
        if len(words) > 1 and words[0] == "kvarn" and words[1] in main.commands:
            command = main.commands[words[1]]
            known = {flag for param in command.params for flag in [*param.opts, *param.secondary_opts]} | {"--help"}
            used = {word for word in words[2:] if word.startswith("-")}
            assert used <= known, f"README: {line.strip()}"


def test_waiting_threads_sleep_and_that_is_set_before_torch_is_loaded() -> None:
    code = (
        "import os, sys; os.environ.pop('OMP_WAIT_POLICY', None); import kvarn.serve.cli; "
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "PASSIVE False\n"
