"""The command line: what it prints where, its exit codes, and errors of one line."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from cli_models import COMMAND, ENVIRONMENT, PROMPT, ROOT, fails, save_model

import replayssm.models
from replayssm.cli import main

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("draft"), seed=2)


def _subprocess(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, cwd=ROOT, env=ENVIRONMENT, timeout=120, check=False, **options
    )


def _fails(capsys, arguments, exit_code, *fragments):
    err = fails(capsys, arguments, exit_code, *fragments)
    assert err.count("\n") == 1, err


def _json(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["generate", "--help"], ["info", "--help"], ["bench", "--help"], ["bench", "mamba", "--help"]],
)
def test_help(capsys, arguments):
    assert main(arguments) == 0
    assert "usage: replayssm" in capsys.readouterr().out


def test_help_of_generate_shows_examples(capsys):
    main(["generate", "--help"])
    assert "replayssm generate --compare" in capsys.readouterr().out


def test_help_tells_the_draft_lengths_that_generation_takes(capsys):
    from replayssm.hf.drafts import MOST_LOOKUP_TOKENS, MOST_OTHER_TOKENS

    main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"default: {MOST_LOOKUP_TOKENS} by look-up, {MOST_OTHER_TOKENS} from a model" in text


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "COMMAND"),
        (["genrate"], "invalid choice: 'genrate'"),
        (["generate", "--promt", "a"], "unrecognized arguments: --promt (see replayssm generate --help)"),
        (["generate", "--num-draft-tokens", "0"], "expected an integer in 1..63, got '0'"),
        (["generate", "--num-draft-tokens", "many"], "got 'many'"),
        (["generate", "--max-new-tokens", "0"], "expected an integer of at least 1"),
        (["generate", "--temperature", "-1"], "expected a number of at least 0"),
        (["generate", "--temperature", "nan"], "got 'nan'"),
        (["generate", "--top-p", "1.5"], "in 0..1"),
        (["generate", "--prompt", "a", "--top-k", "5"], "need --temperature above 0"),
        (["generate", "--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--prompt", "a", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["generate", "--prompt", "a", "--device", "abacus"], "'abacus' is no torch device"),
        (["generate", "--compare", "--draft", "none"], "--compare needs drafts"),
        (["generate", "--num-draft-tokens", "3", "--draft", "none"], "--num-draft-tokens needs drafts"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(capsys, arguments, fragment):
    _fails(capsys, arguments, 2, fragment)


def test_failures_are_one_line_and_exit_code_1(capsys, tmp_path, model):
    missing = tmp_path / "none.txt"
    _fails(capsys, ["generate", "--prompt-file", str(missing)], 1, f"file {missing}: No such file or directory")
    device = f"cuda:{torch.cuda.device_count()}"
    _fails(capsys, ["generate", "--prompt", "a", "--device", device], 1, "CUDA device(s) here")
    reason = f"from '{tmp_path}': the folder has no config.json"
    _fails(capsys, ["generate", str(tmp_path), "--prompt", "a"], 1, f"cannot load the tokenizer {reason}")
    _fails(capsys, ["generate", model, "--prompt", "a", "--draft", str(tmp_path)], 1, f"load the draft model {reason}")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    _fails(capsys, ["generate", model, "--prompt-file", str(tmp_path / "latin.txt")], 1, "latin.txt")


@pytest.mark.parametrize("name", ["./none", "/none", "a/b/c", "", __file__])
@pytest.mark.parametrize("place", ["draft model", "tokenizer"])
def test_what_is_neither_a_folder_nor_an_id(capsys, model, name, place):
    if place == "draft model":
        _fails(
            capsys,
            ["generate", model, "--prompt", "a", "--draft", name],
            1,
            f"cannot load the draft model from '{name}'",
        )
    elif name:  # an empty MODEL is the shipped one
        _fails(capsys, ["generate", name, "--prompt", "a"], 1, "it is neither a folder nor a hub id")


def test_a_broken_file_of_weights_is_named(capsys, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    with open(broken / "model.safetensors", "r+b") as weights:
        weights.truncate(100)
    _fails(capsys, ["generate", str(broken), "--prompt", "a"], 1, f"cannot load the model from '{broken}'")


@pytest.fixture
def hub(monkeypatch):
    """A network that works until it is given an error; returns what was asked of it."""
    from replayssm.hf import pretrained

    asked = []

    class Session:
        error = None

        def head(self, url, timeout):
            asked.append((url, timeout))
            if self.error is not None:
                raise self.error

    session = Session()
    monkeypatch.setattr(pretrained.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(pretrained, "get_session", lambda: session)
    session.asked = asked
    return session


def test_retries_of_the_hub_are_not_printed(capsys, monkeypatch, hub):
    logger, heard = logging.getLogger("huggingface_hub.utils._http"), []
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "level", logging.WARNING)

    def unreachable(name, **options):
        heard.append((logger.isEnabledFor(logging.WARNING), options))
        raise OSError("cannot connect\nto the hub")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    assert main(["generate", "some/model", "--prompt", "a"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        "replayssm: asking https://huggingface.co for the tokenizer 'some/model'",
        "replayssm: error: cannot load the tokenizer from 'some/model': cannot connect to the hub",
    ]
    assert heard == [(False, {})]


def test_a_hub_that_does_not_answer_is_asked_once(capsys, monkeypatch, hub):
    hub.error = ConnectionError("no route\nto host")
    heard = []

    def not_stored(name, **options):
        heard.append(options)
        raise OSError("a long explanation")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", not_stored)
    assert main(["generate", "some/model", "--prompt", "a"]) == 1
    assert "cannot be reached (no route to host), and nothing is stored here" in capsys.readouterr().err
    assert heard == [{"local_files_only": True}] and len(hub.asked) == 1 and hub.asked[0][1] <= 10


@pytest.mark.parametrize(
    ("name", "meant"),
    [("tiny-mamba", "tiny-mamba2"), ("Tiny-Mamba2", "tiny-mamba2"), ("tiny-gdn", "tiny-gdn-hybrid"),
     ("tiny-mamba2/", "tiny-mamba2"), ("some/model", None)],
)  # fmt: skip
@pytest.mark.parametrize("reachable", [False, True])
def test_a_mistyped_name_of_a_shipped_model_is_corrected(capsys, monkeypatch, hub, name, meant, reachable):
    hub.error = None if reachable else ConnectionError("no route to host")

    def unknown(name, **options):
        raise OSError("no such repository")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unknown)
    err = fails(capsys, ["generate", name, "--prompt", "a"], 1, f"cannot load the tokenizer from '{name}'")
    assert (f"; did you mean the shipped model {meant}?" in err) == (meant is not None)


def test_a_folder_needs_no_hub(capsys, model, hub):
    hub.error = ConnectionError("no route to host")
    assert _json(capsys, "generate", model, "--prompt", "a", "--max-new-tokens", "1")["new_tokens"] == 1
    assert hub.asked == []


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_that_are_no_text(model, locale):
    for arguments, data in ((["--prompt-file", "-"], b"\xff\xfe"), (["--prompt", b"caf\xe9"], b"")):
        environment = ENVIRONMENT | {"LC_ALL": locale}
        done = subprocess.run(
            [*COMMAND, "generate", model, *arguments], input=data, capture_output=True, env=environment, check=False
        )
        assert done.returncode == 1 and done.stdout == b""
        assert done.stderr.count(b"\n") == 1 and (b"not UTF-8 text" in done.stderr or b"can't decode" in done.stderr)


@pytest.mark.parametrize("command", ["info", "info --json", "generate --prompt a --max-new-tokens 2 --compare"])
def test_a_reader_that_has_gone_is_no_failure(command):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *command.split()], stdout=writer, stderr=subprocess.PIPE, env=ENVIRONMENT, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_device_without_ops_is_refused(capsys, model):
    _fails(capsys, ["generate", model, "--prompt", "abc", "--device", "meta"], 1, "meta")


def test_an_unsupported_family_is_refused(capsys, tmp_path, model):
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=256
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    _fails(capsys, ["generate", str(tmp_path), "--prompt", "abc"], 1, "mamba2")


def test_a_traceback_can_be_asked_for(monkeypatch, model):
    monkeypatch.setenv("REPLAYSSM_TRACEBACK", "1")
    with pytest.raises(NotImplementedError):
        main(["generate", model, "--prompt", "abc", "--device", "meta"])


def test_our_warnings_are_one_line_and_others_are_silent(capsys, monkeypatch):
    from replayssm.cli import generate

    def run(_):
        warnings.warn_explicit("of a library", UserWarning, "other.py", 1, module="torch.something")
        warnings.warn_explicit("two\nlines", UserWarning, "linear.py", 1, module="replayssm.hf.linear")
        return 0

    monkeypatch.setattr(generate, "run", run)
    assert main(["generate"]) == 0
    assert capsys.readouterr().err == "replayssm: warning: two lines\n"


def test_what_libraries_say_while_they_are_imported_is_silent(capsys, monkeypatch):
    """torch without numpy warns when it is imported, in three lines before every command's output."""
    from replayssm import cli

    def say():
        warnings.warn_explicit("of torch", UserWarning, "other.py", 1, module="torch.something")
        return SimpleNamespace(run=lambda _: 0)

    monkeypatch.setattr(cli.importlib, "import_module", lambda _: say())
    assert main(["info"]) == 0 and capsys.readouterr() == ("", "")


def test_ctrl_c_during_an_import_that_loses_it(capsys, monkeypatch):
    from replayssm import cli

    def lose(_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt:
            pass
        return SimpleNamespace(run=lambda _: pytest.fail("the command ran"))

    monkeypatch.setattr(cli.importlib, "import_module", lose)
    assert main(["info"]) == cli.INTERRUPTED and capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_info(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for word in ("torch", torch.__version__, "checkpointing_ssu", "causal_conv1d_replay", "mamba2"):
        assert word in out
    report = _json(capsys, "info")
    assert report["versions"]["transformers"] == transformers.__version__
    assert report["devices"][0] == report["devices"][0] | {"device": "cpu", "supported": True}


def test_json_and_drafts_change_nothing(capsys, model, draft_model):
    common = ["generate", model, "--prompt", PROMPT, "--max-new-tokens", "21"]
    plain = _json(capsys, *common, "--draft", "none")
    assert plain["new_tokens"] == len(plain["token_ids"]) == 21
    assert plain["prompt_tokens"] == len(PROMPT)
    assert plain["drafted"] == 0
    lookup = _json(capsys, *common, "--num-draft-tokens", "3")
    drafted = _json(capsys, *common, "--draft", draft_model)
    own = _json(capsys, *common, "--draft", model)
    assert plain["token_ids"] == lookup["token_ids"] == drafted["token_ids"] == own["token_ids"]
    assert own["accept_rate"] == 1.0 and own["rounds"] < 10
    assert drafted["accept_rate"] < 1.0


def test_exact_decode(capsys, model):
    common = ["generate", model, "--prompt", PROMPT, "--max-new-tokens", "21", "--exact"]
    drafted, plain = _json(capsys, *common), _json(capsys, *common, "--draft", "none")
    assert drafted["exact"] and drafted["token_ids"] == plain["token_ids"]
    assert not _json(capsys, *common[:-1])["exact"]


def test_sampling_depends_on_the_seed_alone(capsys, model):
    common = ["generate", model, "--prompt", PROMPT, "--max-new-tokens", "19", "--temperature", "0.9", "--top-k", "50"]
    first = _json(capsys, *common, "--seed", "3")
    assert first["token_ids"] == _json(capsys, *common, "--seed", "3", "--draft", "none")["token_ids"]
    assert first["token_ids"] != _json(capsys, *common, "--seed", "4")["token_ids"]


def test_only_the_text_when_piped(capsys, model):
    arguments = ["generate", model, "--max-new-tokens", "17"]
    expected = _json(capsys, *arguments, "--prompt", PROMPT)["text"] + "\n"
    done = _subprocess(*arguments, input=PROMPT.encode())
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.decode() == expected


def test_prompt_from_a_file(capsys, tmp_path, model):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    arguments = ["generate", model, "--max-new-tokens", "5"]
    assert (
        _json(capsys, *arguments, "--prompt-file", str(path))["token_ids"]
        == _json(capsys, *arguments, "--prompt", PROMPT)["token_ids"]
    )


def test_no_prompt_for_a_model_of_the_user(model):
    for given, code, words in ((b"", 2, b"the prompt is empty"), (None, 2, b"no prompt: give --prompt")):
        stdin = {"input": given} if given is not None else {"stdin": subprocess.DEVNULL}
        done = _subprocess("generate", model, **stdin)
        assert done.returncode == code and words in done.stderr and done.stdout == b""


def test_compare(capsys, model):
    arguments = ["generate", model, "--prompt", PROMPT, "--max-new-tokens", "24", "--compare"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for words in ("transformers", "tokens/s", "accept", "written", "snapshots", "token for token equal"):
        assert words in out, out
    report = _json(capsys, *arguments)
    assert [way["name"] for way in report["ways"]] == ["transformers", "replay", "replay + drafts"]
    assert report["equal"] is True and report["exact"] is False and "exact" not in out
    assert main([*arguments, "--exact"]) == 0 and "; exact decode" in " ".join(capsys.readouterr().out.split())
    assert _json(capsys, *arguments, "--exact")["exact"] is True
    assert report["memory"]["replay"] < report["memory"]["snapshots"] and report["memory"]["key_values"] == 0
    assert "keys and values" not in out


def test_compare_counts_keys_and_values(capsys):
    arguments = ["generate", "tiny-gdn-hybrid", "--prompt", PROMPT, "--max-new-tokens", "20", "--compare"]
    assert main(arguments) == 0
    assert "keys and values of attention: " in " ".join(capsys.readouterr().out.split())
    report = _json(capsys, *arguments)
    theirs, plain, drafted = report["ways"]
    key = "key_value_bytes_read_per_token", "key_value_bytes_written_per_token"
    assert [theirs[name] for name in key] == [None, None]
    # Keys and values in fp32 of as many layers as have attention: every token is written once, drafts besides.
    config = transformers.AutoConfig.from_pretrained(replayssm.models.path("tiny-gdn-hybrid"))
    layers = config.layer_types.count("full_attention")
    row = layers * 2 * config.num_key_value_heads * config.head_dim * 4
    assert plain[key[1]] == pytest.approx(row * 19 / 20)  # the last token is not read any more
    assert drafted[key[1]] >= plain[key[1]] and min(way[key[0]] for way in (plain, drafted)) > row
    assert report["memory"]["key_values"] >= row * 20


def test_the_shipped_model_is_the_default():
    done = _subprocess("generate", "--max-new-tokens", "12", stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stderr == b""
    assert len(done.stdout.decode().split()) > 3
