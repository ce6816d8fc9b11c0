"""The options of every command. Nothing here loads torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from replayssm import __version__
from replayssm.bench import FAMILIES, RANDOM_MODELS, Family, GenerateOptions, Options
from replayssm.cli.errors import UsageError
from replayssm.models import NAMES

GENERATE_EXAMPLES = """\
examples:
  replayssm generate                                   a small shipped model continues its demo prompt
  replayssm generate --prompt "Once upon a time"
  replayssm generate --compare                         speed and memory, with and without speculation
  replayssm generate ./my-mamba2 --draft ./my-draft-model --prompt-file question.txt
  git diff | replayssm generate ./my-mamba2 --temperature 0.8 --seed 7 > answer.txt
"""

BENCH_EXAMPLES = """\
examples:
  replayssm bench mamba                                the standard table of this device
  replayssm bench mamba --op step --state-dtype bf16,fp32 --tokens 1,4 --batch 8,64 --mode mix
  replayssm bench mamba --peers --output results       FlashInfer measured beside ours where it is installed
  replayssm bench mamba --quick --json                 a few small cases, for a script
  replayssm bench mamba --output results --plot        CSV files and pictures
  replayssm bench generate --batch 1,16                tokens per second of the shipped model
"""

MODEL_HELP = f"a shipped model ({', '.join(NAMES)}), or a folder or hub id of yours (default: {NAMES[0]})"

DRAFT_HELP = """\
where draft tokens come from: 'lookup' (what followed the same words earlier in the text), 'none' (no speculation), or
the path or id of a smaller model with the same tokenizer (default: lookup)"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; argparse would print the whole usage first."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Name the command whose option is unknown; argparse leaves that to the parser of the whole line."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest


def _number(kind: type[int] | type[float], low: float, high: float = float("inf")) -> Callable[[str], int | float]:
    """Return an argparse type: a number of ``kind`` in ``low..high``."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(low - 1)
        if not low <= value <= high:
            bound = f"of at least {low}" if high == float("inf") else f"in {low}..{high}"
            noun = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {noun} {bound}, got '{text}'")
        return value

    return parse


def _list(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return an argparse type: values that ``parse`` takes, with commas between them."""
    return lambda text: [parse(part) for part in text.split(",")]


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    """Return an argparse type: one of ``names``."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(names)}, got '{text}'")
        return text

    return parse


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; ``options.command`` names the module that runs."""
    parser = _Parser(
        prog="replayssm",
        description="Speculative decoding for state-space models that replays recent inputs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"replayssm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_generate(commands)
    _add_bench(commands)
    info = commands.add_parser(
        "info", help="versions, devices and what runs where", description="Versions, devices and what runs where."
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_generate(commands: argparse._SubParsersAction) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue a prompt, with speculative decoding by replay",
        description="Continue a prompt. Greedy and exact: drafts change the speed, never the text.",
        epilog=GENERATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generate.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    prompt = generate.add_argument_group(
        "prompt (default: standard input when it is piped)"
    ).add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read it from a file, '-' for standard input")

    speculation = generate.add_argument_group("speculation")
    speculation.add_argument("--draft", default="lookup", metavar="none|lookup|PATH", help=DRAFT_HELP)
    speculation.add_argument(
        "--num-draft-tokens",
        type=_number(int, 1, 63),
        metavar="N",
        help="longest draft, 1..63 (default: 11 by look-up, 4 from a model)",
    )
    sampling = generate.add_argument_group("text")
    sampling.add_argument(
        "--max-new-tokens", type=_number(int, 1), default=256, metavar="N", help="stop after so many (default: 256)"
    )
    sampling.add_argument(
        "--temperature", type=_number(float, 0), default=0.0, metavar="X", help="0 is greedy (default), above 0 samples"
    )
    sampling.add_argument("--top-k", type=_number(int, 1), metavar="N", help="sample among the N likeliest tokens")
    sampling.add_argument("--top-p", type=_number(float, 0, 1), metavar="X", help="sample among the likeliest share X")
    sampling.add_argument(
        "--seed", type=_number(int, 0), default=0, metavar="N", help="the same seed gives the same text (default: 0)"
    )
    compute = generate.add_argument_group("computation")
    compute.add_argument("--device", default="cpu", help="torch device, cpu or cuda (default: cpu)")
    compute.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="dtype that the weights are rounded to; computation is in float32 (default: float32)",
    )
    compute.add_argument(
        "--exact",
        action="store_true",
        help="decode with the bits of one scan over the whole text (Mamba-2 models; slower)",
    )
    output = generate.add_argument_group("output")
    output.add_argument(
        "--compare",
        action="store_true",
        help="also run without drafts and with transformers' own generate; print speed, accept rate, memory",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def _add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser(
        "bench",
        help="check the ops, then time them",
        description="Check an op against its fp64 reference, then time it, beside other libraries.",
        epilog=BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    families = bench.add_subparsers(dest="family", required=True, metavar="FAMILY", parser_class=_Parser)
    for name, family in FAMILIES.items():
        _add_bench_family(families, name, family)
    _add_bench_generate(families)


def _add_bench_family(families: argparse._SubParsersAction, name: str, family: Family) -> None:
    parser = families.add_parser(
        name,
        help=family.summary,
        description=f"{family.summary}. Several values: 1,4,8. They replace those of the standard table.",
    )
    parser.set_defaults(options_type=Options)
    lines = parser.add_argument_group("what is measured")
    sizes = _list(_number(int, 1))
    for option, dest, known in (("--op", "ops", family.ops), ("--mode", "modes", family.modes)):
        meanings = "; ".join(f"{name}: {meaning}" for name, meaning in known.items())
        lines.add_argument(
            option, dest=dest, type=_list(_one_of(tuple(known))), metavar=option[2:].upper(), help=meanings
        )
    lines.add_argument(
        "--state-dtype",
        dest="state_dtypes",
        type=_list(_one_of(family.state_dtypes)),
        metavar="TYPE",
        help=", ".join(family.state_dtypes),
    )
    lines.add_argument("--tokens", type=sizes, metavar="N", help="new tokens of a step")
    lines.add_argument("--batch", dest="batches", type=sizes, metavar="N", help="requests")
    lines.add_argument("--heads", type=sizes, metavar="N", help="heads that have a state")
    lines.add_argument("--groups", type=sizes, metavar="N", help="heads of B and C, or of keys and queries")
    lines.add_argument("--quick", action="store_true", help="a few small cases and fewer repeats")
    lines.add_argument(
        "--peers",
        action="store_true",
        help="then time other libraries that are installed, which may compile for minutes; else published numbers",
    )
    _add_bench_output(parser)


def _add_bench_generate(families: argparse._SubParsersAction) -> None:
    standard = GenerateOptions()
    parser = families.add_parser(
        "generate",
        help="tokens per second with and without drafts, and of transformers' own generate",
        description="Tokens per second of whole calls, greedy, beside transformers' own generate.",
    )
    parser.set_defaults(options_type=GenerateOptions)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=MODEL_HELP,
    )
    lines = parser.add_argument_group("what is measured")
    lines.add_argument(
        "--random", choices=RANDOM_MODELS, help="in its place random weights, of the size of a published Mamba-2"
    )
    lines.add_argument("--dtype", choices=("float32", "bfloat16"), default=standard.dtype, help="of the weights")
    lines.add_argument(
        "--batch", dest="batches", type=_list(_number(int, 1)), metavar="N", help="sequences, several as 1,16"
    )
    for name, low, what in (
        ("prompt-tokens", 1, "length of the prompts"),
        ("max-new-tokens", 2, "tokens to write"),
        ("repeats", 1, "timed calls of each way"),
    ):
        default = getattr(standard, name.replace("-", "_"))
        lines.add_argument(
            f"--{name}", type=_number(int, low), default=default, metavar="N", help=f"{what} (default: {default})"
        )
    lines.add_argument("--num-draft-tokens", type=_number(int, 1, 63), metavar="N", help="longest draft")
    lines.add_argument("--exact", action="store_true", help="also exact decode, and what it costs (Mamba-2 models)")
    lines.add_argument(
        "--patience",
        type=_number(float, 0),
        default=standard.patience,
        metavar="SECONDS",
        help="when transformers' own generate stops; what it has written counts (default: %(default)s)",
    )
    lines.add_argument("--quick", action="store_true", help="one timed call of a few tokens")
    _add_bench_output(parser)


def _add_bench_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="cpu|cuda", help="where to run (default: cuda if there is one)")
    output = parser.add_argument_group("output")
    output.add_argument("--output", metavar="DIR", help="write one CSV file per table there")
    output.add_argument("--plot", action="store_true", help="and pictures; needs matplotlib")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
