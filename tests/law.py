"""The law of octavo: a request's ids and log-probabilities depend on the model, the request and its seed.

`Law.broken` serves requests with some features together, and compares every answer with that of the same request alone:
in one step for the whole prompt, without a prefix cache, in a pool that never runs short.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from law_features import FEATURES, REFUSED, Feature
from law_runs import Answer, Ask, Blocking, Options, Params, Run, Subject, blocking
from octavo import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams


@dataclass(frozen=True)
class Case:
    """Features that are on at once."""

    subject: Subject
    features: tuple[Feature, ...]

    @property
    def name(self) -> str:
        return f"{self.subject.letter}: {' x '.join(feature.name for feature in self.features)}"

    def params(self, index: int) -> Params:
        """What the request for one prompt asks for. The drawn token's own log-probability always is."""
        base = {"temperature": 0, "ignore_eos": True, "max_tokens": self.subject.max_tokens + index, "logprobs": 0}
        return merged([base, *(feature.params(self.subject, index) for feature in self.features)])

    def options(self) -> Options:
        subject, asked = self.subject, self.params(0)
        choices: int = asked.get("n") or asked.get("beam_width") or 1
        own = merged([feature.options(subject, choices) for feature in self.features])
        return plain_options(subject) | own

    def order(self) -> list[int]:
        count = len(self.subject.prompts)
        orders = [feature.order(count) for feature in self.features if feature.order is not None]
        return [index for order in orders or [list(range(count))] for index in order]


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What stands further down in the table counts."""
    return {name: value for part in parts for name, value in part.items()}


def plain_options(subject: Subject) -> Options:
    return {
        "device": subject.device,
        "block_size": subject.block_size,
        "num_kv_blocks": subject.pool_tokens // subject.block_size,
        "max_model_len": 512,
        "enable_prefix_caching": False,
    }


def pair_cases(subject: Subject) -> list[Case]:
    """Every feature by itself, and every pair that can be."""
    known = [feature for feature in FEATURES if subject in feature.subjects]
    pairs = [pair for pair in combinations(known, 2) if frozenset(one.name for one in pair) not in REFUSED]
    return [Case(subject, features) for features in [*((feature,) for feature in known), *pairs]]


def named(subject: Subject, *names: str) -> Case:
    features = tuple(feature for feature in FEATURES if feature.name in names)
    assert len(features) == len(names), f"{names}: not all of them are features"
    return Case(subject, features)


@dataclass
class Law:
    """Runs cases, each once, over plain runs that are made once too."""

    models: Mapping[str, Path]
    """The checkpoint of each subject, by the subject's letter."""
    judge: Callable[[RequestOutput, RequestOutput], list[str]] = field(default_factory=lambda: differences)
    """In words, what makes an answer another one than the plain run's."""
    _plain: dict[str, LLM] = field(default_factory=dict)
    _alone: dict[str, list[RequestOutput]] = field(default_factory=dict)
    _doubts: dict[str, list[str]] = field(default_factory=dict)
    _broken: dict[str, list[str]] = field(default_factory=dict)
    _engines: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self._engines.close()

    def broken(self, case: Case) -> list[str]:
        """Sentences about answers that differ from the plain run, and about features that were not there."""
        if case.name not in self._broken:
            self._broken[case.name] = self._judged(case)
        return self._broken[case.name]

    def _judged(self, case: Case) -> list[str]:
        run = self.run(case)
        found = [f"{feature.name}, not so: {feature.seen}" for feature in case.features if not feature.happened(run)]
        if not case.options()["enable_prefix_caching"] and any(output.num_cached_tokens for output in run.outputs):
            found.append("tokens were found in a prefix cache that is off")
        expected = self.alone(case)
        for answer in run.answers:
            found += [f"prompt {answer.index}: {it}" for it in self.judge(answer.output, expected[answer.index])]
        return found + self._doubts_about_the_plain_run(case)

    def _doubts_about_the_plain_run(self, case: Case) -> list[str]:
        """Asking for more continuations, or for log-probabilities, changes nothing in the plain run either."""
        expected, found = self.alone(case), []
        key = _key(case, {})
        if key in self._doubts or "beam_width" in case.params(0):
            return self._doubts.get(key, [])
        single = self.alone(case, n=1, logprobs=0, prompt_logprobs=None)
        silent = self.alone(case, n=1, logprobs=None, prompt_logprobs=None, max_tokens=8)
        for index, (whole, one, none) in enumerate(zip(expected, single, silent, strict=True)):
            if drawn(whole.outputs[0]) != drawn(one.outputs[0]):
                found.append(f"prompt {index} alone: choice 0 is not what n=1 gives")
            if one.outputs[0].token_ids[:8] != none.outputs[0].token_ids:
                found.append(f"prompt {index} alone: log-probabilities change the tokens")
            # What rules have changed is no longer what the model says of the same tokens as a prompt.
            by_model = [] if any(feature.changes_logits for feature in case.features) else whole.outputs[1:]
            for choice, completion in enumerate(by_model, 1):
                if drawn(completion)[-1] != self._scored_anew(case, index, completion):
                    found.append(f"prompt {index} alone: choice {choice} was computed from other tokens than its own")
        self._doubts[key] = found
        return found

    def _scored_anew(self, case: Case, index: int, completion: CompletionOutput) -> tuple[int, float]:
        """The last token, and the log-probability that it has when all before it is a prompt."""
        *before, last = completion.token_ids
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
        llm = self._plain_engine(case.subject)
        [output] = llm.generate([case.subject.prompts[index] + before], params, use_tqdm=False)
        assert output.outputs[0].logprobs is not None
        return last, output.outputs[0].logprobs[0][last].logprob

    def run(self, case: Case) -> Run:
        """The case's requests, with all its features."""
        together = any(feature.together for feature in case.features)
        faces = [feature.face for feature in case.features if feature.face is not blocking]
        asks = {index: ask(case, index) for index in case.order()}
        with (faces or [blocking])[0](self.models[case.subject.letter], case.options()) as face:
            # From the bottom of the table, so that what fills the prefix cache comes last.
            for feature in reversed(case.features):
                for batch in feature.before(case.subject):
                    face.together(batch)
            order = case.order()
            if together:
                outputs = face.together([asks[index] for index in order])
            else:
                outputs = [face.together([asks[index]])[0] for index in order]
            answers = [Answer(index, output) for index, output in zip(order, outputs, strict=True)]
            return Run(answers, face.threads)

    def alone(self, case: Case, **override: Any) -> list[RequestOutput]:
        """Each of the case's requests in the plain run, in the order of the prompts."""
        key = _key(case, override)
        if key not in self._alone:
            face = Blocking(self._plain_engine(case.subject))
            asks = [ask(case, index, **override) for index in range(len(case.subject.prompts))]
            self._alone[key] = [face.together([one])[0] for one in asks]
        return self._alone[key]

    def _plain_engine(self, subject: Subject) -> LLM:
        if subject.letter not in self._plain:
            llm = LLM(self.models[subject.letter], threads=1, **plain_options(subject))
            self._plain[subject.letter] = self._engines.enter_context(llm)
        return self._plain[subject.letter]


def ask(case: Case, index: int, **override: Any) -> Ask:
    """The case's request for one prompt."""
    prompt, params = case.subject.prompts[index], case.params(index) | override
    if "beam_width" not in params:
        return Ask(prompt, SamplingParams(**params))
    return Ask(prompt, BeamSearchParams(**{name: params[name] for name in ("beam_width", "max_tokens", "ignore_eos")}))


def _key(case: Case, override: Params) -> str:
    """Cases that ask for the same have the same plain run."""
    asked = [case.params(index) | override for index in range(len(case.subject.prompts))]
    return f"{case.subject.letter} {[sorted(params.items()) for params in asked]}"


def drawn(completion: CompletionOutput) -> list[tuple[int, float]]:
    """Each token with its own log-probability."""
    assert completion.logprobs is not None
    return [(token, row[token].logprob) for token, row in zip(completion.token_ids, completion.logprobs, strict=True)]


def differences(found: RequestOutput, expected: RequestOutput) -> list[str]:
    """In words, with the first place at which each continuation differs. Numbers are compared bit for bit."""
    if found.prompt_token_ids != expected.prompt_token_ids or not found.finished:
        return [f"another prompt, or not finished: {found}"]
    if len(found.outputs) != len(expected.outputs):
        return [f"{len(found.outputs)} continuations, expected {len(expected.outputs)}"]
    sentences = []
    if found.prompt_logprobs != expected.prompt_logprobs:
        sentences.append(f"log-probabilities of the prompt are {found.prompt_logprobs}")
    for choice, (mine, plain) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        if mine == plain:
            continue
        rows = zip(drawn(mine), drawn(plain), strict=False)
        at = next((f"at {at}: {one}, expected {other}" for at, (one, other) in enumerate(rows) if one != other), None)
        sentences.append(f"choice {choice}: {at or f'{mine}, expected {plain}'}")
    return sentences
