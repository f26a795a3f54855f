"""The engine and the tokenizer, written in Rust."""

from os import PathLike
from typing import Final, Literal, TypedDict, final, type_check_only

__all__ = [
    "Core",
    "Delta",
    "Grammar",
    "Inbox",
    "Story",
    "Tokenizer",
    "__version__",
    "draw_many",
    "export_model",
    "export_tokenizer",
    "host",
    "measure_dot_peak",
    "measure_read_bandwidth",
    "memory_plan",
    "probe_cuda",
]

__version__: Final[str]

@type_check_only
class EngineOptions(TypedDict):
    threads: int | None
    seed: int
    block_size: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int | None
    num_kv_blocks: int | None
    kv_cache_dtype: Literal["auto", "bfloat16", "int8"]
    dtype: Literal["auto", "bfloat16"]
    int16_activations: list[str]
    cuda_library_folders: list[str]
    enable_prefix_caching: bool

@type_check_only
class RequestParams(TypedDict):
    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: list[str]
    include_stop_str_in_output: bool
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: list[tuple[int, float]]
    allowed_token_ids: list[int] | None
    bad_words: list[list[int]]
    beam: tuple[int, float] | None
    pooling: Literal["last", "mean"] | None
    deadline_ms: float | None
    grammar: Grammar | None
    detokenize: bool
    skip_special_tokens: bool
    cache_salt: str | None
    skip_reading_prefix_cache: bool

@type_check_only
class HostFacts(TypedDict):
    features: list[str]
    isa: str
    threads: int
    affinity: int
    quota: int | None
    nodes: int
    cores: int
    memory_limit: int

@type_check_only
class MemoryNeeds(TypedDict):
    weight_bytes: int
    kv_bytes: int
    arena_bytes: int
    kv_bytes_per_token: int
    num_blocks: list[int]
    max_model_len: int

@type_check_only
class CudaMissing(TypedDict):
    missing: str
    has_driver: bool

@type_check_only
class CudaFacts(TypedDict):
    name: str
    compute_capability: tuple[int, int]
    memory: int
    driver: tuple[int, int]
    multiprocessors: int
    cublaslt: str

def host() -> HostFacts: ...
def probe_cuda(library_folders: list[str]) -> CudaFacts | CudaMissing: ...
def memory_plan(model: str | PathLike[str], *, device: str, options: EngineOptions) -> MemoryNeeds: ...

@type_check_only
class Draws(TypedDict):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    count: int

def draw_many(logits: list[float], draws: Draws, *, device: str) -> list[int]: ...
def export_model(model: str | PathLike[str], folder: str | PathLike[str]) -> None: ...
def export_tokenizer(model: str | PathLike[str], folder: str | PathLike[str]) -> None: ...
def measure_read_bandwidth(threads: int, num_bytes: int | None = None) -> float: ...
def measure_dot_peak(threads: int) -> float: ...

@final
class Core:
    def __new__(
        cls,
        model: str | PathLike[str],
        *,
        device: str,
        tokenizer: str | PathLike[str] | None,
        options: EngineOptions,
    ) -> Core: ...
    def inbox(self) -> Inbox: ...
    def submit(self, inbox: Inbox, prompts: list[list[int]], params: list[RequestParams]) -> list[tuple[int, int]]: ...
    def compile_grammar(
        self, kind: Literal["json", "json_object", "regex", "choice", "grammar"], source: str
    ) -> Grammar: ...
    def abort(self, ids: list[int]) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def block_map(self) -> list[list[tuple[int, int, bool]]]: ...
    def reset_prefix_cache(self) -> int: ...
    def measure_product_rate(self) -> float: ...
    def inject_panic(self, message: str) -> None: ...
    def close(self) -> None: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def architecture(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def device(self) -> Literal["cpu", "cuda", "reference"]: ...
    @property
    def threads(self) -> int: ...
    @property
    def memory(self) -> dict[str, int]: ...
    @property
    def generation_defaults(self) -> dict[str, float | int | bool]: ...

@final
class Inbox:
    def recv(self, timeout: float) -> list[Delta]: ...
    def abort(self) -> None: ...

@final
class Delta:
    @property
    def request(self) -> int: ...
    @property
    def choice(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[list[tuple[int, float, int, str | None]]] | None: ...
    @property
    def cumulative_logprob(self) -> float | None: ...
    @property
    def prompt_logprobs(self) -> list[list[tuple[int, float, int, str | None]]] | None: ...
    @property
    def pooled(self) -> list[float] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...
    @property
    def last(self) -> bool: ...
    @property
    def story(self) -> Story: ...

@final
class Story:
    @property
    def arrival(self) -> float: ...
    @property
    def scheduled(self) -> float | None: ...
    @property
    def first_token(self) -> float | None: ...
    @property
    def last_token(self) -> float | None: ...
    @property
    def chunks(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def first_difference(self) -> int | None: ...

@final
class Grammar: ...

@final
class Tokenizer:
    @staticmethod
    def from_file(path: str | PathLike[str]) -> Tokenizer: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def control_tokens(self) -> dict[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]: ...
    def mark(self, text: str, marker: str) -> str: ...
    def encode_marked(self, text: str, marker: str) -> list[int]: ...
    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...
    def token(self, token_id: int) -> str | None: ...
    def token_id(self, token: str) -> int | None: ...
