"""Which requests an engine takes. Pure."""

from libs.contracts.errors import ContextTooLong, InvalidRequest
from libs.engine.port import Capabilities, Phase
from libs.engine.sequence import Sequence


def check_request(sequence: Sequence, capabilities: Capabilities) -> None:
    """Raises InvalidRequest when the sequence could never run on an engine with these capabilities."""
    request = sequence.request
    if not 1 <= request.prompt_tokens <= sequence.length:
        raise InvalidRequest(f"prompt_tokens is {request.prompt_tokens}, but the sequence has {sequence.length} tokens")
    if sequence.length >= capabilities.max_context_tokens:
        raise ContextTooLong(
            f"{sequence.length} tokens leave no room in a context of {capabilities.max_context_tokens}"
        )
    if sequence.length >= sequence.max_length:
        raise InvalidRequest(f"max_output_tokens {request.max_output_tokens} is already reached")
    ids = {int(request.token_ids.min()), int(request.token_ids.max()), *request.sampling.logit_bias}
    if capabilities.vocab_size and not 0 <= min(ids) <= max(ids) < capabilities.vocab_size:
        raise InvalidRequest(f"token ids must be from 0 to {capabilities.vocab_size - 1}, in logit_bias too")
    _check_kv(sequence)
    if sequence.blocks_at_most > capabilities.kv_blocks:
        raise InvalidRequest(
            f"the sequence can need {sequence.blocks_at_most} KV blocks, the engine has {capabilities.kv_blocks}"
        )


def _check_kv(sequence: Sequence) -> None:
    request = sequence.request
    if (request.phase is Phase.DECODE) != (request.kv is not None):
        raise InvalidRequest("a KV handle belongs to phase DECODE, and to no other")
    if request.kv is not None and request.kv.tokens < request.prompt_tokens - 1:
        raise InvalidRequest(
            f"the KV handle covers {request.kv.tokens} tokens: of a prompt of {request.prompt_tokens}"
            " at most the last token may be missing"
        )
