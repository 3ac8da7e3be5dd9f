"""The answer to a fixed prompt, which verifies the weights of a model that was woken.

An engine can wake without an error, and then answer nothing or noise until its weights are read again.
"""

import asyncio
from typing import Final

import numpy as np

from libs.contracts.errors import FulcrumError, StartupError, one_line
from libs.engine.port import Engine, EnginePhase, EngineRequest, SamplingParams

SEQUENCE_ID: Final = 0
"""An id that is free again before the worker serves."""
PROMPT_TOKENS: Final = 16
OUTPUT_TOKENS: Final = 4
LIMIT_S: Final = 60.0
MAX_REASON_CHARS: Final = 200


class KnownAnswer:
    """The answer of one loaded model, which must be the same after each wake."""

    def __init__(self) -> None:
        self._token_ids: tuple[int, ...] | None = None

    async def check(self, engine: Engine) -> None:
        """Check an engine whose events are not read yet. The first answer is stored as the correct one.

        Raise StartupError if a later answer differs, if none arrives in time, or if the engine fails.
        """
        capabilities = engine.capabilities
        if not (capabilities.sleeps and capabilities.generates):
            return
        try:
            async with asyncio.timeout(LIMIT_S):
                found = await _greedy(engine, capabilities.vocab_size)
        except TimeoutError:
            raise StartupError(f"the model gives no answer within {LIMIT_S:.0f} s") from None
        except FulcrumError:
            raise
        except Exception as error:  # any failure of the engine, for example after its device lost the weights
            raise StartupError(f"the engine failed at a known prompt: {one_line(error, MAX_REASON_CHARS)}") from error
        self._token_ids = self._token_ids or found
        if len(found) != OUTPUT_TOKENS or found != self._token_ids:
            raise StartupError(
                f"the model answers a known prompt with tokens {found}, and answered {self._token_ids} before it slept"
            )


async def _greedy(engine: Engine, vocab_size: int) -> tuple[int, ...]:
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32) % (vocab_size or PROMPT_TOKENS)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.submit(
        EngineRequest(SEQUENCE_ID, "known answer", EnginePhase.BOTH, prompt, len(prompt), OUTPUT_TOKENS, sampling)
    )
    token_ids: tuple[int, ...] = ()
    async for event in engine.events():
        for output in event.outputs:
            token_ids += output.token_ids
            if output.finish is not None:
                return token_ids
    raise StartupError("the engine ended before it gave an answer")
