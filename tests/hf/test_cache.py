"""ReplayCache by itself: forwards, crop, accept, and what it refuses."""

import copy

import pytest
import torch
from tiny import cache_name, fresh_model, make_prompts, step_logits
from transformers import DynamicCache

import replayssm.hf as hf

# Ids that every model has.
TEXT, OTHER = (make_prompts("biases", (90,), seed=seed)[0] for seed in (5, 6))


# Mamba-2 layers, and Gated DeltaNet with attention.
@pytest.fixture(scope="module", params=["biases", "next"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return hf.attach(fresh_model(name))


@pytest.fixture(scope="module")
def expected(name):
    return step_logits(fresh_model(name), TEXT)


@pytest.fixture(scope="module")
def expected_other(name):
    return step_logits(fresh_model(name), OTHER)


def every_tensor(cache):
    """All that a row has a part of."""
    tensors = [tensor for buffers in cache.pool.buffers for tensor in vars(buffers).values() if tensor is not None]
    return tensors + ([t for pair in cache._attention._layers.values() for t in pair] if cache._attention else [])


def feed(model, cache, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), **{cache.name: cache}).logits[0]


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_forwards_with_a_cache_record_no_gradients(name, model, whole):
    """Those without one still do. Replay writes in place: a backward would fail in the middle, or miss layers."""
    run = model if whole else model.base_model
    exacts = (False, True) if name == "biases" else (False,)
    for exact in exacts:
        with hf.ReplayCache(model, 1, max_tokens=4, exact=exact) as cache:
            for tokens in (TEXT[:9], TEXT[9:12]):
                out = run(torch.tensor([tokens]), **{cache.name: cache})[0]
                assert not out.requires_grad and not out.is_inference()
    assert run(torch.tensor([TEXT[:9]]))[0].requires_grad


def test_a_cache_shows_what_it_holds(model):
    with hf.ReplayCache(model, 1, max_tokens=4) as cache:
        feed(model, cache, TEXT[:9])
        feed(model, cache, TEXT[9:12])
        assert repr(cache) == "ReplayCache(rows of [12] tokens, max_tokens=4)"


@pytest.mark.parametrize("wrong", range(6))
@pytest.mark.parametrize("window", [5, 7, 16])
def test_crop_takes_tokens_back_in_every_layer(model, expected, wrong, window):
    """From 58 tokens on, so that the room for keys grows while tokens are open."""
    with hf.ReplayCache(model, 1, max_tokens=5, window=window) as cache:
        close(feed(model, cache, TEXT[:58]), expected[:58])
        at = 58
        for _ in range(5):
            right = 5 - wrong
            got = feed(model, cache, TEXT[at : at + right] + OTHER[:wrong])
            close(got[:right], expected[at : at + right])
            cache.crop(-wrong)
            at += right
            assert cache.get_seq_length() == at
        close(feed(model, cache, TEXT[at : at + 1]), expected[at : at + 1])


def test_transformers_own_crop_keeps_rejected_tokens(name, expected):
    """The reason for this cache; if it fails, transformers has learned to roll back and the docs should say so."""
    plain = fresh_model(name)
    cache = DynamicCache(config=plain.config)
    cache.activate_past_recording()
    with torch.no_grad():
        for tokens in (TEXT[:8], TEXT[8:10] + OTHER[:3]):
            plain(torch.tensor([tokens]), **{cache_name(plain): cache})
        cache.crop(-3)
        got = plain(torch.tensor([TEXT[10:12]]), **{cache_name(plain): cache}).logits[0]
    assert (got - expected[10:12]).abs().max() > 1e-2


def test_pending_tokens_count_as_accepted_and_crop_zero_accepts(model, expected):
    with hf.ReplayCache(model, 1) as cache:
        assert not cache.has_previous_state() and cache.get_seq_length() == 0
        for a, b in ((0, 3), (3, 4), (4, 10), (10, 18), (18, 19)):
            close(feed(model, cache, TEXT[a:b]), expected[a:b])
        cache.crop(0)
        with pytest.raises(ValueError, match=r"expected at least 0, the newest forward's tokens.*got -1"):
            cache.crop(-1)
        close(feed(model, cache, TEXT[19:22]), expected[19:22])
        assert cache.has_previous_state() and cache.is_croppable and not cache.is_compileable


def test_rows_accept_different_counts(model, expected, expected_other):
    with hf.ReplayCache(model, 2, max_tokens=4, window=6) as cache, torch.no_grad():
        model(torch.tensor([TEXT[:5], OTHER[:5]]), **{cache.name: cache})
        at = [5, 5]
        for counts in ([4, 1], [0, 3], [2, 4], [3, 0], [1, 4]):
            windows = [TEXT[at[0] : at[0] + 4], OTHER[at[1] : at[1] + 4]]
            logits = model(torch.tensor(windows), **{cache.name: cache}).logits
            close(logits[0], expected[at[0] : at[0] + 4])
            close(logits[1], expected_other[at[1] : at[1] + 4])
            cache.accept(counts)
            at = [a + c for a, c in zip(at, counts, strict=True)]
        cache.select([1])
        close(feed(model, cache, OTHER[at[1] : at[1] + 2]), expected_other[at[1] : at[1] + 2])
        cache.select([1, 0])  # in another order, the other one longer
        at[1] += 2
        logits = model(torch.tensor([OTHER[at[1] : at[1] + 3], TEXT[at[0] : at[0] + 3]]), **{cache.name: cache}).logits
        close(logits[0], expected_other[at[1] : at[1] + 3])
        close(logits[1], expected[at[0] : at[0] + 3])


def test_a_forward_that_was_taken_back_repeats_its_bits(model):
    with hf.ReplayCache(model, 1) as cache:
        feed(model, cache, TEXT[:5])
        first = feed(model, cache, TEXT[5:9])
        cache.crop(-4)
        assert torch.equal(feed(model, cache, TEXT[5:9]), first)


def test_other_rows_are_neither_read_nor_written(model, expected):
    with hf.ReplayCache(model, 3) as cache, torch.no_grad():
        model(torch.tensor([TEXT[:5]] * 3), **{cache.name: cache})
        tensors = every_tensor(cache)
        for tensor in tensors:
            tensor[1] = torch.nan
        cache.select([2, 0])
        got = model(torch.tensor([TEXT[5:8]] * 2), **{cache.name: cache}).logits
        close(got[0], expected[5:8])
        close(got[1], expected[5:8])
        assert all(tensor[1].isnan().all() for tensor in tensors)


def test_a_poisoned_tenant_leaves_nothing(model, expected):
    with hf.ReplayCache(model, 2) as cache:
        for row in (0, 1):
            cache.select([row])
            feed(model, cache, OTHER[:70])
            feed(model, cache, OTHER[70:74])
        for tensor in every_tensor(cache):
            tensor.fill_(torch.nan)
        cache.reset()
        cache.select([1])
        for a, b in ((0, 2), (2, 7), (7, 8)):
            close(feed(model, cache, TEXT[a:b]), expected[a:b])


def test_refusals(name, model):
    argument = cache_name(model)
    with pytest.raises(ValueError, match=r"call replayssm\.hf\.attach\(model\) first"):
        hf.ReplayCache(fresh_model(name), 1)
    with pytest.raises(ValueError, match=r"batch_size: expected 1 <= batch_size <= .*, got 0"):
        hf.ReplayCache(model, 0)
    with pytest.raises(ValueError, match="max_tokens"):
        hf.ReplayCache(model, 1, max_tokens=9, window=8)
    with hf.ReplayCache(model, 2, max_tokens=3) as cache, torch.no_grad():
        with pytest.raises(ValueError, match="expected 2 rows as the ReplayCache has, got 1"):
            model(torch.tensor([[3, 4]]), **{argument: cache})
        with pytest.raises(ValueError, match="strips padding itself"):
            model(torch.tensor([[3, 4], [5, 6]]), attention_mask=torch.tensor([[0, 1], [1, 1]]), **{argument: cache})
        cache.select([0])
        model(torch.tensor([[3, 4]]), **{argument: cache})
        cache.select([0, 1])
        with pytest.raises(ValueError, match="rows with and without a past"):
            model(torch.tensor([[3], [4]]), **{argument: cache})
        cache.select([0])
        with pytest.raises(ValueError, match="at most max_tokens=3 tokens after the prefill, got 4"):
            model(torch.tensor([[3, 4, 5, 6]]), **{argument: cache})
        with pytest.raises(ValueError, match="found none"):
            cache.accept([1])
        model(torch.tensor([[3, 4]]), **{argument: cache})
        for counts in ([3], [-1], [1, 1]):
            with pytest.raises(ValueError, match=r"expected 1 numbers in 0\.\.2"):
                cache.accept(counts)
        with pytest.raises(ValueError, match="expected zero or a negative number, got 1"):
            cache.crop(1)
        with pytest.raises(ValueError, match=r"expected at least -2, .*got -3"):
            cache.crop(-3)
        cache.crop(-2)
        for rows in ([0, 0], [2], [-1]):
            with pytest.raises(ValueError, match=r"rows: expected distinct numbers in 0\.\.1"):
                cache.select(rows)
        for call in (lambda: cache.reorder_cache(torch.tensor([1, 0])), lambda: cache.batch_repeat_interleave(2),
                     lambda: cache.batch_select_indices(torch.tensor([0]))):  # fmt: skip
            with pytest.raises(NotImplementedError, match="ReplayCache"):
                call()
    unattached = pytest.raises(RuntimeError, match="the model is not attached")
    with hf.ReplayCache(model, 1) as cache, torch.no_grad(), unattached:
        fresh_model(name)(torch.tensor([[3, 4]]), **{argument: cache})


def test_close_frees_the_slots_once(model):
    cache = hf.ReplayCache(model, 3)
    assert cache.pool.num_free == 0
    cache.close()
    cache.close()
    assert cache.pool.num_free == 3


def test_a_closed_cache_says_so(model):
    with hf.ReplayCache(model, 1) as cache:
        feed(model, cache, TEXT[:3])
    for use in (lambda: feed(model, cache, [3]), lambda: cache.crop(0), lambda: cache.select([0]), cache.accept):
        with pytest.raises(ValueError, match="ReplayCache: closed, its slots are freed; make a new one"):
            use()


def test_a_cache_serves_its_own_model_only(name, model, expected):
    twin = hf.attach(fresh_model(name, seed=9))
    with hf.ReplayCache(model, 1) as cache:
        feed(model, cache, TEXT[:9])
        with pytest.raises(ValueError, match="made for another model"):
            feed(twin, cache, TEXT[9:11])
        close(feed(model, cache, TEXT[9:12]), expected[9:12])
    for nothing in (None, "model"):
        with pytest.raises(ValueError, match="model: expected an attached model"):
            hf.ReplayCache(nothing, 1)


def test_a_model_that_was_detached_meanwhile_says_so():
    model = hf.attach(fresh_model())
    with hf.ReplayCache(model, 1) as cache:
        feed(model, cache, TEXT[:9])
        hf.detach(model)
        for tokens in ([3], [3, 4]):
            with pytest.raises(RuntimeError, match="the model is not attached; call"):
                feed(model, cache, tokens)


@pytest.mark.parametrize("prefilled", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_forward_that_breaks_off_ends_the_row_until_reset(model, expected, prefilled, last):
    """Window 4: layers before the error fold their rings, those behind it do not; or attention alone is left."""
    with hf.ReplayCache(model, 1, max_tokens=4, window=4) as cache:
        if prefilled:
            feed(model, cache, TEXT[:9])
            feed(model, cache, TEXT[9:12])
        layers = model.base_model.layers
        broken = getattr(layers[-1], "self_attn", layers[-1]) if last else layers[1]
        hook = broken.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            feed(model, cache, TEXT[12:14])
        hook.remove()
        for use in (lambda: feed(model, cache, TEXT[12:14]), lambda: cache.crop(-2), lambda: cache.accept([0])):
            with pytest.raises(ValueError, match="broke off between two layers; call reset, and prefill again"):
                use()
        cache.reset()
        close(feed(model, cache, TEXT[:9]), expected[:9])
        close(feed(model, cache, TEXT[9:12]), expected[9:12])


def test_numbers_of_the_wrong_type(model, expected):
    with hf.ReplayCache(model, 1) as cache:
        feed(model, cache, TEXT[:9])
        with pytest.raises(ValueError, match="input_ids: expected at least one token, got none"):
            model(torch.zeros(1, 0, dtype=torch.int64), **{cache.name: cache})
        feed(model, cache, TEXT[9:12])
        for value in (-1.0, None, "a", True, torch.tensor(-1)):
            with pytest.raises(TypeError, match="tokens_to_remove: expected an int, got "):
                cache.crop(value)
        for value in ([1.5], [True], "a", [None]):
            with pytest.raises(TypeError, match="num_accepted: expected an int or several, got "):
                cache.accept(value)
        cache.accept(torch.tensor([2]))
        assert type(cache.get_seq_length()) is int and cache.get_seq_length() == 11
        for value in ([0.5], None, "a", [True]):
            with pytest.raises(TypeError, match="rows: expected an int or several, got "):
                cache.select(value)
        cache.select(torch.tensor([0]))
        close(feed(model, cache, TEXT[11:14]), expected[11:14])
        with pytest.raises(NotImplementedError, match="cannot be copied; run the prompt through a second cache"):
            copy.deepcopy(cache)
