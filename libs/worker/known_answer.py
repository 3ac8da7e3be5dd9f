"""The answer to a fixed prompt, by which a model that was woken shows that its weights are back.

An engine can wake without an error and answer with nothing, or with noise, until its weights are read again.
"""

import asyncio
from typing import Final

import numpy as np

from libs.contracts.errors import FulcrumError, StartupError, one_line
from libs.engine.port import Engine, EnginePhase, EngineRequest, SamplingParams

SEQUENCE_ID: Final = 0
"""Free again before the worker serves."""
PROMPT_TOKENS: Final = 16
OUTPUT_TOKENS: Final = 4
LIMIT_S: Final = 60.0
MAX_REASON_CHARS: Final = 200


class KnownAnswer:
    """The answer of one loaded model, which is the same after each wake."""

    def __init__(self) -> None:
        self._token_ids: tuple[int, ...] | None = None

    async def check(self, engine: Engine) -> None:
        """Ask an engine whose events nobody reads yet. The first answer counts as right.

        Raise StartupError if a later one differs, or if there is none in time or the engine fails.
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
        except Exception as error:  # whatever made the engine fail, such as a device that lost its weights
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
