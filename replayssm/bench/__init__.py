"""What ``replayssm bench`` runs: the ops of a family, and generation, checked first and then timed.

A family is a module of this package that the command line finds by its name in `FAMILIES`. It has two functions::

    def cases(options: Options) -> list[Case]    # what to measure, in the order of the table; allocates nothing
    def plots(tables: Tables) -> list[Plot]      # pictures of finished tables (replayssm.bench.plot); may be empty

`cases` starts from the family's standard table and lets ``vary(lines, batch=options.batches, ...)`` put in what the
user asked for. It raises `BadOption` for what the family cannot do. A case's ``run(timer)`` allocates its buffers,
runs the op once, compares with the fp64 reference through `replayssm.bench.timing.verify` (of a large case a few rows
and heads are enough), which raises `WrongAnswer`, and only then asks the timer. It returns one row: a dict from column
to value, with the same columns in every row of a table, in the order in which they are shown, None where there is no
value. Columns that every family has: ``us`` (microseconds of a call on buffers that no cache holds), where small
batches are measured ``cached_us`` (the same on so few buffers that the L2 holds them, as other libraries' times were
taken; None for large ones), ``bytes`` (which the call must move),
``floor_us`` (their time at the copy ceiling that the timer measured), ``of_ceiling`` (``floor_us / us``), ``error``
(what `verify` returned), then for each peer ``<peer>_us``, and ``peers``, which says where the peers' numbers are from:
``"this run"`` behind what ran, or the name and version of a published number, which was measured in another run. The
command line knows nothing else of a family: it shows progress, prints the tables, writes one CSV per table, and draws.

Peers are imported inside the functions that time them. Nothing in this file loads torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from replayssm.bench.timing import Timer

__all__ = [
    "FAMILIES",
    "RANDOM_MODELS",
    "BadOption",
    "Case",
    "Family",
    "GenerateOptions",
    "Options",
    "Row",
    "Tables",
    "WrongAnswer",
    "vary",
]

Row = dict[str, Any]
Tables = dict[str, list[Row]]
T = TypeVar("T")


class WrongAnswer(Exception):
    """An op did not compute what its reference does; nothing is timed then."""


class BadOption(Exception):
    """The family has nothing to measure for these options."""


@dataclass(frozen=True)
class Case:
    """One measurement, which becomes one row of a table.

    Attributes:
        table: name of the table, also of its CSV file.
        label: what is being measured, for the line of progress.
        run: checks, times and returns the row.
    """

    table: str
    label: str
    run: Callable[[Timer], Row]


@dataclass(frozen=True)
class Options:
    """What the user asked of an op family. None stands for the family's standard values.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        ops: names from ``Family.ops``.
        modes: names from ``Family.modes``.
        state_dtypes: names from ``Family.state_dtypes``.
        tokens: T.
        batches: requests.
        heads: heads that have a state.
        groups: heads that B and C, or keys and queries, have; divides the heads.
        quick: a few small cases and fewer repeats.
        peers: time other libraries that can be imported, on a GPU. They may compile for minutes, so this is asked
            for; it comes when all rows are there without it, and in another process (`replayssm.bench.apart`).
    """

    device: str = "cpu"
    ops: Sequence[str] | None = None
    modes: Sequence[str] | None = None
    state_dtypes: Sequence[str] | None = None
    tokens: Sequence[int] | None = None
    batches: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    groups: Sequence[int] | None = None
    quick: bool = False
    peers: bool = False


# Hidden size and layers of the published Mamba-2 models: heads of 64, one group, state dim 128, 50288 tokens.
RANDOM_MODELS = {"130m": (768, 24), "370m": (1024, 48), "780m": (1536, 48), "1.3b": (2048, 48), "2.7b": (2560, 64)}


@dataclass(frozen=True)
class GenerateOptions:
    """What the user asked of ``replayssm bench generate``, which is a family too, with a model in place of an op.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        model: a shipped model, a folder or a hub id; None for the first shipped model.
        random: a key of `RANDOM_MODELS`: random weights in place of a model.
        dtype: ``"float32"`` or ``"bfloat16"``, of the weights.
        batches: sequences; None for 1, on a GPU also 16 and 64.
        prompt_tokens: length of the prompts.
        max_new_tokens: tokens that are written for each of them.
        num_draft_tokens: longest draft; None for what ``generate`` takes.
        exact: also with ``generate(..., exact=True)``, which Mamba-2 models have.
        patience: seconds after which transformers' own generate stops; what it has written by then counts.
        repeats: timed calls of each way.
        quick: one timed call of a few tokens.
    """

    device: str = "cpu"
    model: str | None = None
    random: str | None = None
    dtype: str = "float32"
    batches: Sequence[int] | None = None
    prompt_tokens: int = 128
    max_new_tokens: int = 128
    num_draft_tokens: int | None = None
    exact: bool = False
    patience: float = 30.0
    repeats: int = 3
    quick: bool = False


@dataclass(frozen=True)
class Family:
    """What the command line offers of an op family.

    Attributes:
        summary: one line of help.
        ops: what can be measured, with the meaning of each.
        state_dtypes: types that its state may have.
        modes: kinds of a step, with the meaning of each.
    """

    summary: str
    ops: dict[str, str]
    state_dtypes: tuple[str, ...]
    modes: dict[str, str]


FAMILIES = {
    "mamba": Family(
        summary="Mamba-2: checkpointing_ssu and replayssm_materialize",
        ops={"step": "checkpointing_ssu", "materialize": "replayssm_materialize, all layers"},
        state_dtypes=("fp32", "bf16", "fp16", "int8", "fp8"),
        modes={
            "hold": "8 live rows, no state is written",
            "mix": "0..16 live rows through the batch, as in a server",
            "flush": "every request writes its state",
        },
    ),
    "gdn": Family(
        summary="Gated DeltaNet: verify, commit, and decoding in place and with the lazy ring",
        ops={
            "verify": "outputs of draft tokens, states frozen",
            "commit": "accepted tokens into the states, all layers",
            "update": "decoding that writes the state in each step",
            "lazy": "decoding with the ring, the mean over its cycle",
        },
        state_dtypes=("fp32", "bf16", "fp16"),
        modes={"frozen": "verify alone", "windows": "verify that records its tokens for commit"},
    ),
    "exact": Family(
        summary="Mamba-2 with the bits of the prefill: exact decode, and the chunk scan",
        ops={"decode": "batch_invariant_decode", "scan": "chunk_scan over one sequence"},
        state_dtypes=("fp32",),
        modes={
            "mix": "lanes all over their chunks, as in a server",
            "chunk": "the mean over the steps of a chunk, every lane folds once",
        },
    ),
}


def vary(lines: Sequence[T], **chosen: Sequence[Any] | None) -> list[T]:
    """Put chosen values into every line of a standard table, and drop what is then there twice.

    Args:
        lines: frozen dataclasses.
        chosen: for a field, the values that replace its own; None leaves it.

    Returns:
        The new lines, in the order of the old ones.

    Example:
        >>> lines = [Options(device="cpu", tokens=(1,)), Options(device="cpu", tokens=(4,))]
        >>> [(line.device, line.tokens) for line in vary(lines, tokens=[(8,)], device=None)]
        [('cpu', (8,))]
    """
    for name, values in chosen.items():
        if values is not None:
            lines = [dataclasses.replace(line, **{name: value}) for line in lines for value in values]  # type: ignore[type-var]
    return list(dict.fromkeys(lines))
