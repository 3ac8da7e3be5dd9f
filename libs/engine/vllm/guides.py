"""Guides in vLLM's scheduler: the backend that compiles them, and requests that continue from generated tokens."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import llguidance.torch
from llguidance import LLMatcher, LLTokenizer
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputBackend

from libs.engine.guides import GuideFailed, load_vocabulary
from libs.engine.vllm.step_reports import GENERATED_KEY
from libs.model.info import load_model_info


class GuideBackend(StructuredOutputBackend):  # type: ignore[misc]  # vLLM is untyped here
    """A backend for grammars in llguidance's Lark dialect, as in `SamplingParams.guide`.

    vLLM builds its backends from a tokenizer, which EngineCore does not have here. Guides use the vocabulary that the
    other engines read.
    """

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The model's vocabulary, read for the first guide in tenths of a second. Raises GuideFailed."""
        return load_vocabulary(load_model_info(self.vllm_config.model_config.model))

    def compile_grammar(
        self, _request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> GuidanceGrammar:
        """Compile a guide. Raise GuideFailed if it is not a valid grammar."""
        matcher = LLMatcher(self.vocabulary, grammar_spec, log_level=0)
        if matcher.is_error():
            raise GuideFailed(matcher.get_error())
        return GuidanceGrammar(matcher, self.vocabulary, self.vocabulary.vocab_size)

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        """Return [sequences, vocab / 32] 2D int32."""
        return llguidance.torch.allocate_token_bitmask(max_num_seqs, self.vocabulary.vocab_size)

    def destroy(self) -> None:
        # There is nothing to free.
        ...


def serve_guides(manager: StructuredOutputManager) -> None:
    """Make vLLM compile guides although EngineCore has no tokenizer."""
    config = manager.vllm_config
    manager.backend = GuideBackend(config, tokenizer=None, vocab_size=config.model_config.get_vocab_size())
    # With one thread, the task that consumes tokens runs after the one that compiles their grammar.
    manager.executor = ThreadPoolExecutor(1, thread_name_prefix="guides")


def follow_generated(request: Request, manager: StructuredOutputManager) -> None:
    """Make a request's grammar consume the tokens that were generated elsewhere before it constrains the next one.

    vLLM starts a grammar at the prompt's end, and treats tokens of another worker as part of the prompt.
    """
    generated = (request.sampling_params.extra_args or {}).get(GENERATED_KEY, 0)
    if generated:
        output_request = request.structured_output_request
        tokens = request.prompt_token_ids[-generated:]
        output_request.grammar = manager.executor.submit(_after, output_request._grammar, request.request_id, tokens)


def _after(compiled: "Future[GuidanceGrammar]", request_id: str, tokens: list[int]) -> GuidanceGrammar:
    grammar = compiled.result()
    if not grammar.accept_tokens(request_id, tokens):
        raise GuideFailed("the tokens so far do not fit the guide")
    return grammar
