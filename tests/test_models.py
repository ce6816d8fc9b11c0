"""The shipped models: small, loadable, trained, and held out from their own test passages."""

from __future__ import annotations

import importlib
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from replayssm import models

EXAMPLES = Path(__file__).parent.parent / "examples"
LARGEST = 8_000_000
# Nats per token, a tenth above what was measured (2.24, 2.05). Token frequencies alone give 6.5.
LOSS_BOUNDS = {"tiny-mamba2": 2.35, "tiny-gdn-hybrid": 2.15}


@pytest.fixture(scope="module", params=models.NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def loaded(name):
    transformers = pytest.importorskip("transformers")
    folder = models.path(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def recipe(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_package_stays_small(name):
    files = list(models.path(name).iterdir())
    assert {file.name for file in files} >= {"model.safetensors", "tokenizer.json", "config.json", "README.md"}
    assert sum(file.stat().st_size for file in files) <= LARGEST


def test_finding_a_model_loads_nothing_heavy():
    code = "import sys, replayssm.models as m; m.demo_prompt(); print({'torch', 'transformers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("function", [models.path, models.demo_prompt, models.heldout_prompts])
def test_unknown_name(function):
    with pytest.raises(ValueError, match=r"name: expected one of the shipped models tiny-mamba2.*, got 'huge-mamba'"):
        function("huge-mamba")


def test_loads_as_float32_with_everything_in_place(loaded):
    model, tokenizer = loaded
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert len(tokenizer) == model.config.vocab_size
    ends = (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id)
    pads = (model.generation_config.pad_token_id, model.config.pad_token_id, tokenizer.pad_token_id)
    assert set(ends) == {0} and set(pads) == {1}
    assert tokenizer("<|document|>").input_ids == [0]


def test_no_weight_is_missing_in_the_file(name, loaded):
    model, tokenizer = loaded
    again = type(model).from_pretrained(models.path(name)).eval()  # what is missing would be drawn anew
    ids = tokenizer("Return *True* if", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert torch.equal(model(ids, use_cache=False).logits, again(ids, use_cache=False).logits)


@pytest.mark.parametrize("text", ["   >>> f(x)\n\n\n   1.0\n", "a  b\t\tc ", "naïve Σ 漢字 🐍", ""])
def test_tokenizer_loses_nothing(loaded, text):
    tokenizer = loaded[1]
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(ids) <= len(text.encode())


def test_passages(name, loaded, recipe):
    tokenizer, corpus, held_out = loaded[1], recipe("tiny_corpus"), models._heldout(name)
    assert tuple(passage["document"] for passage in held_out["passages"]) == corpus.HELD_OUT
    assert held_out["demo"]["document"] in corpus.HELD_OUT
    assert len(set(models.heldout_prompts(name))) == 20
    low, high = corpus.PROMPT_TOKENS
    for passage in [held_out["demo"], *held_out["passages"]]:
        prompt, continuation = (tokenizer(passage[part]).input_ids for part in ("prompt", "continuation"))
        assert low <= len(prompt) <= high and len(continuation) == corpus.CONTINUATION_TOKENS
        assert tokenizer(passage["prompt"] + passage["continuation"]).input_ids == prompt + continuation


def test_passages_are_not_in_the_training_text(name, recipe):
    corpus = recipe("tiny_corpus")
    if not corpus.SOURCES.exists():
        pytest.skip("the corpus (Debian's python3.11-doc) is not installed")
    documents = corpus.read_documents(corpus.SOURCES)
    training = "\0".join(text for name, text in documents.items() if name not in corpus.HELD_OUT).encode()
    for prompt in [models.demo_prompt(name), *models.heldout_prompts(name)]:
        assert corpus.longest_shared_run(prompt.encode(), training, least=120) == 0


def test_shared_runs_are_found(recipe):
    longest_shared_run = recipe("tiny_corpus").longest_shared_run
    text, shared = bytes(range(100)), bytes(range(33, 78))
    assert longest_shared_run(text, b"--" + shared + b"--", least=10) == 45
    assert longest_shared_run(text, b"--" + shared + b"--", least=45) == 45
    assert longest_shared_run(text, b"--" + shared + b"--", least=46) == 0


def test_held_out_loss(name, loaded):
    model, tokenizer = loaded
    losses = []
    for passage in models._heldout(name)["passages"][::5]:
        prompt, continuation = (tokenizer(passage[part]).input_ids for part in ("prompt", "continuation"))
        ids = torch.tensor([prompt + continuation])
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]).item())
    assert sum(losses) / len(losses) < LOSS_BOUNDS[name]


def test_demo_text_is_text(name, loaded, recipe):
    model, tokenizer = loaded
    ids = tokenizer(models.demo_prompt(name), return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=96, do_sample=False)[0, ids.shape[1] :].tolist()
    assert recipe("accept_rate").before_loop(new, period=32) == len(new) == 96
    assert len(set(pairwise(new))) > 40
    text = tokenizer.decode(new)
    assert text.isascii() and text.isprintable() is False  # it has line breaks
    assert sum(word.isalpha() for word in text.split()) > 20


def test_drafts_change_nothing(name, loaded):
    hf = pytest.importorskip("replayssm.hf")
    model, tokenizer = loaded
    ids = tokenizer(models.heldout_prompts(name)[2], return_tensors="pt").input_ids
    plain = hf.generate(model, ids, draft=None, max_new_tokens=48)
    fast, stats = hf.generate(model, ids, draft="lookup", max_new_tokens=48, return_stats=True)
    assert torch.equal(plain, fast)
    assert stats.rounds < 40 and stats.accepted > 8
    assert torch.equal(fast, model.generate(ids, max_new_tokens=48, do_sample=False))


@pytest.mark.parametrize(
    "file, scan, decay", [("train_tiny_mamba2", "chunk_scan", 2), ("train_tiny_gdn_hybrid", "chunk_delta_rule", 3)]
)
def test_training_forward_is_checked(recipe, monkeypatch, file, scan, decay):
    check_forward, training = recipe("tiny_training").check_forward, recipe(file)
    check_forward(training.RECIPE, torch.device("cpu"))
    exact = getattr(training, scan)
    monkeypatch.setattr(training, scan, lambda *a: exact(*a[:decay], a[decay] * 1.01, *a[decay + 1 :]))
    with pytest.raises(SystemExit, match="differs"):
        check_forward(training.RECIPE, torch.device("cpu"))


@pytest.mark.parametrize("beta", [0.5, 0.9, 1.0])
def test_triangles_of_repeated_keys_are_inverted(recipe, beta):
    training = recipe("train_tiny_gdn_hybrid")
    L = beta * torch.ones(2, 64, 64).tril(-1)
    inverse = training.UnitLowerInverse.apply(L.requires_grad_())
    torch.testing.assert_close(inverse @ (torch.eye(64) + L), torch.eye(64).expand(2, 64, 64), rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(inverse[..., 40, 3].sum(), L)
    wanted = torch.autograd.grad(torch.linalg.inv(torch.eye(64) + L)[..., 40, 3].sum(), L)[0].tril(-1)
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)


def test_loops_are_cut_after_their_first_round(recipe):
    before_loop = recipe("accept_rate").before_loop
    assert before_loop([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 5], period=3) == 4
    assert before_loop([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 5], period=2) == 11
    assert before_loop([9, 1, 2, 3, 1, 2, 3, 1, 2], period=3) == 9
    assert before_loop([7, 7, 7], period=4) == 1


def test_accepted_drafts_are_counted(recipe):
    count = recipe("accept_rate").count
    prompt, text = [1, 2, 3, 4], [1, 2, 3, 4, 5]
    # Round 1 drafts nothing that fits before any n-gram repeats; after the 1 it drafts 2, 3; after the 4: 1, 2.
    drafted, accepted, rounds = count(prompt, text, [True] * 5, 2)
    assert (accepted, rounds) == (2, 3) and drafted >= 2
    assert count(prompt, text, [False] * 5, 2)[1:] == (0, 5)
