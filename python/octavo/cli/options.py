"""Options that commands share: how the engine is built and how tokens are chosen.

Names are those of `LLM` and `SamplingParams` with dashes. An option that is not given is not passed on, so the defaults
live in one place only. Each engine option can also be set by a variable: `--max-model-len` by `OCTAVO_MAX_MODEL_LEN`.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo import LLM, SamplingParams


class UsageError(OctavoError):
    """The command line, or a variable that stands for an option, is wrong."""


_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

_SWITCHES = {"1": True, "true": True, "0": False, "false": False}


def _count(text: str) -> int:
    scale = _SUFFIXES.get(text[-1:], 1)
    return int(text if scale == 1 else text[:-1]) * scale


def _json_object(text: str) -> dict[str, Any]:
    found = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    if not isinstance(found, dict):
        raise ValueError
    return found


@dataclass(frozen=True)
class Kind:
    """How the text of an option is read, and what to say when it cannot be."""

    read: Callable[[str], Any]
    expected: str


TEXT = Kind(str, "text")
WHOLE = Kind(int, "a whole number")
NUMBER = Kind(float, "a number")
COUNT = Kind(_count, "a whole number such as 4096, 4k (4000) or 4K (4096)")
WHOLE_OR_NONE = Kind(lambda text: None if text == "none" else int(text), "a whole number or none")
SWITCH = Kind(lambda text: _SWITCHES[text.lower()], "1, true, 0 or false")
WHOLE_LIST = Kind(lambda text: [int(word) for word in text.split(",")], "whole numbers with commas between them")
NAMES = Kind(lambda text: [word.strip() for word in text.split(",") if word.strip()], "names with commas between them")
TEXTS = Kind(str, "text")
"""An option that may be given again: its values are listed."""
OBJECT = Kind(_json_object, "an object in JSON, or @ and the file that holds it")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: the parameter it sets, how its text is read, and what it means."""

    name: str
    kind: Kind = TEXT
    choices: Sequence[str] = ()
    metavar: str = ""
    help: str

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that stands for the option."""
        return "OCTAVO_" + self.name.upper()

    @property
    def placeholder(self) -> str:
        """What stands for the value in the help text."""
        return f"{{{','.join(self.choices)}}}" if self.choices else self.metavar

    def parse(self, text: str) -> Any:
        """The value that `text` stands for; a `ValueError` says what was found and what was expected."""
        if self.choices and text not in self.choices:
            raise ValueError(f"found {text!r}, expected one of {', '.join(self.choices)}")
        try:
            return self.kind.read(text)
        except (ValueError, KeyError, RecursionError):
            raise ValueError(f"found {text!r}, expected {self.kind.expected}") from None


ENGINE_OPTIONS = (
    Option(name="device", choices=("auto", "cpu", "cuda", "reference"), help="where to compute (default: auto)"),
    Option(name="threads", kind=WHOLE, metavar="N", help="worker threads (default: cores of one NUMA node)"),
    Option(
        name="max_model_len", kind=COUNT, metavar="TOKENS", help="longest prompt plus answer (default: the model's)"
    ),
    Option(name="max_num_seqs", kind=WHOLE, metavar="N", help="sequences in a step at most (default: 64)"),
    Option(
        name="max_num_batched_tokens",
        kind=COUNT,
        metavar="TOKENS",
        help="tokens computed in a step at most (default: 512)",
    ),
    Option(name="block_size", kind=WHOLE, metavar="TOKENS", help="tokens in a KV block (default: 16)"),
    Option(
        name="kv_cache_memory_bytes",
        kind=COUNT,
        metavar="BYTES",
        help="size of the KV pool, such as 64M (default: at least a longest request, 512M if memory allows)",
    ),
    Option(name="num_kv_blocks", kind=WHOLE, metavar="N", help="size of the KV pool in blocks, instead of in bytes"),
    Option(
        name="kv_cache_dtype",
        choices=("auto", "bfloat16", "int8"),
        help="elements of the KV pool: bfloat16, or int8 in half the memory (default: auto)",
    ),
    Option(
        name="enable_prefix_caching",
        kind=SWITCH,
        help="share KV blocks between requests that begin alike (default: on)",
    ),
    Option(
        name="dtype",
        choices=("auto", "bfloat16"),
        help="activations of quantised weights: 8-bit integers, or bfloat16 (default: auto)",
    ),
    Option(
        name="int16_activations",
        kind=NAMES,
        metavar="NAMES",
        help="projections with quantised weights whose inputs keep 16 bits, of qkv,output,gate_up,down,head"
        " (default: none)",
    ),
    Option(name="tokenizer", metavar="PATH", help="a tokenizer.json, or a folder with one, instead of the model's"),
    Option(name="chat_template", metavar="FILE", help="a chat template instead of the model's"),
    Option(
        name="generation_config",
        choices=("auto", "octavo"),
        help="octavo: ignore the sampling the model recommends (default: auto)",
    ),
    Option(name="served_model_name", metavar="NAME", help="the model's name in what is printed (default: MODEL)"),
)

# Every field of SamplingParams but output_kind: what is printed comes as it is made, or at the end.
SAMPLING_OPTIONS = (
    Option(name="n", kind=WHOLE, metavar="N", help="answers to each prompt (default: 1)"),
    Option(
        name="max_tokens",
        kind=WHOLE_OR_NONE,
        metavar="N",
        help="tokens to generate at most; none: to the context's end (default: 16)",
    ),
    Option(name="min_tokens", kind=WHOLE, metavar="N", help="tokens before the answer may end (default: 0)"),
    Option(name="temperature", kind=NUMBER, metavar="T", help="0 takes the likeliest token each time (default: 1.0)"),
    Option(name="top_k", kind=WHOLE, metavar="K", help="draw from the K likeliest tokens; 0: from all (default: 0)"),
    Option(
        name="top_p", kind=NUMBER, metavar="P", help="draw from the smallest set with this probability (default: 1.0)"
    ),
    Option(
        name="min_p",
        kind=NUMBER,
        metavar="P",
        help="drop tokens below this share of the likeliest one (default: 0.0)",
    ),
    Option(name="seed", kind=WHOLE, metavar="SEED", help="the same seed gives the same tokens (default: a new one)"),
    Option(
        name="presence_penalty",
        kind=NUMBER,
        metavar="P",
        help="what tokens lose that are in the answer already, -2 to 2 (default: 0.0)",
    ),
    Option(
        name="frequency_penalty",
        kind=NUMBER,
        metavar="P",
        help="what tokens lose each time that they are in the answer already, -2 to 2 (default: 0.0)",
    ),
    Option(
        name="repetition_penalty",
        kind=NUMBER,
        metavar="P",
        help="divides the logits of tokens that prompt or answer have already, 0.01 to 100 (default: 1.0)",
    ),
    Option(name="stop", kind=TEXTS, metavar="TEXT", help="end the answer before this text; may be given again"),
    Option(
        name="include_stop_str_in_output", kind=SWITCH, help="end the answer after the stop text (default: before it)"
    ),
    Option(name="stop_token_ids", kind=WHOLE_LIST, metavar="ID,...", help="tokens that end the answer"),
    Option(name="ignore_eos", kind=SWITCH, help="go on after the model's own end token (default: off)"),
    Option(name="bad_words", kind=TEXTS, metavar="TEXT", help="a text that must not come; may be given again"),
    Option(name="allowed_token_ids", kind=WHOLE_LIST, metavar="ID,...", help="the only tokens that may come"),
    Option(
        name="logit_bias",
        kind=OBJECT,
        metavar="JSON",
        help="added to the logits of tokens, -100 to 100: '{\"504\": -100}'; or @FILE",
    ),
    Option(
        name="structured_outputs",
        kind=OBJECT,
        metavar="JSON",
        help="""what the answer has to follow: '{"regex": "[a-z]+"}' or json, choice, grammar; or @FILE""",
    ),
    Option(
        name="logprobs",
        kind=WHOLE,
        metavar="K",
        help="with --json: log-probabilities of each token and of the K likeliest; -1: of all",
    ),
    Option(name="prompt_logprobs", kind=WHOLE, metavar="K", help="with --json: the same for the tokens of the prompt"),
    Option(name="detokenize", kind=SWITCH, help="turn tokens into text (default: on)"),
    Option(name="skip_special_tokens", kind=SWITCH, help="leave control tokens out of the text (default: on)"),
    Option(name="cache_salt", metavar="TEXT", help="share KV blocks only with requests of the same salt"),
    Option(
        name="skip_reading_prefix_cache",
        kind=SWITCH,
        help="compute the whole prompt, whatever the cache holds (default: off)",
    ),
    Option(name="deadline_ms", kind=NUMBER, metavar="MS", help="end the answer after this many milliseconds"),
    Option(name="speculative", kind=SWITCH, help="use drafts; of no effect yet (default: on)"),
    Option(name="user", metavar="TEXT", help="whom the answer is for; of no effect yet"),
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add every engine option."""
    group = parser.add_argument_group("engine", "Each can also be set by a variable: --threads by OCTAVO_THREADS.")
    for option in ENGINE_OPTIONS:
        _add(group, option)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add every field of `SamplingParams`."""
    group = parser.add_argument_group(
        "sampling", "What the model recommends takes the place of these defaults, unless --generation-config is octavo."
    )
    for option in SAMPLING_OPTIONS:
        _add(group, option)


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, on the command line or in the environment."""
    return _environment_settings(os.environ) | _given(arguments, ENGINE_OPTIONS)


def load(arguments: argparse.Namespace) -> LLM:
    """Load the model that the command line names, with its engine options."""
    settings = engine_settings(arguments)
    from octavo import LLM

    return LLM(arguments.model, **settings)


def sampling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, checked, so that a wrong one is found before a model is loaded."""
    from octavo import SamplingParams, StructuredOutputsParams

    given = _given(arguments, SAMPLING_OPTIONS)
    if "structured_outputs" in given:
        known = [field.name for field in fields(StructuredOutputsParams)]
        for name in given["structured_outputs"]:
            if name not in known:
                raise UsageError(f"argument --structured-outputs: found {name!r}, expected one of {', '.join(known)}")
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    SamplingParams(**given)
    return given


def sampling_params(llm: LLM, settings: dict[str, Any]) -> SamplingParams:
    """`settings` over what the model recommends."""
    return replace(llm.default_sampling_params(), **settings)


def _given(arguments: argparse.Namespace, options: Sequence[Option]) -> dict[str, Any]:
    return {option.name: getattr(arguments, option.name) for option in options if hasattr(arguments, option.name)}


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    def read(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": option.help}
    if option.kind is SWITCH:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    else:
        action = "append" if option.kind is TEXTS else "store"
        group.add_argument(option.flag, action=action, type=read, metavar=option.placeholder, **common)


def _environment_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    settings = {}
    for option in ENGINE_OPTIONS:
        text = environment.get(option.variable, "")
        if text:
            try:
                settings[option.name] = option.parse(text)
            except ValueError as error:
                raise UsageError(f"{option.variable}: {error}") from None
    return settings
